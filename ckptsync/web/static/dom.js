// Build elements, and patch the page so that unchanged nodes stay (focus, scrolling, open details).
// Text from a store becomes a text node, never markup.

/** @typedef {Node|string|number|null|undefined|false} Child */
/** @typedef {Record<string, unknown>} Props */

const SVG = "http://www.w3.org/2000/svg";
const HANDLERS = /** @type {const} */ ([
  "onclick", "onchange", "onkeydown", "onpointermove", "onpointerleave", "onfocus", "onblur",
]);

/**
 * Return an element. `on…` properties are handlers; false, null and undefined leave one out.
 * @param {string} tag
 * @param {Props|null} [props]
 * @param {...(Child|Child[])} children
 * @returns {HTMLElement}
 */
export function h(tag, props, ...children) {
  return filled(document.createElement(tag), props, children);
}

/**
 * Return an element of SVG.
 * @param {string} tag
 * @param {Props|null} [props]
 * @param {...(Child|Child[])} children
 * @returns {SVGElement}
 */
export function svg(tag, props, ...children) {
  return filled(/** @type {SVGElement} */ (document.createElementNS(SVG, tag)), props, children);
}

/**
 * Set properties and append children; return the element.
 * @template {Element} E
 * @param {E} element
 * @param {Props|null|undefined} props
 * @param {(Child|Child[])[]} children
 * @returns {E}
 */
function filled(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) Object.assign(element, { [name]: value });
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat()) {
    if (child === false || child === null || child === undefined) continue;
    element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

/**
 * Make the children of `parent` equal to `nodes`, and keep every old node of the same name and key.
 *
 * Elements with the attribute `data-key` stay with their key. One whose `data-same` is equal to
 * before is left alone, with all that is in it.
 * @param {Element} parent
 * @param {Node[]} nodes
 */
export function patch(parent, nodes) {
  const keyed = new Map(
    [...parent.children].filter((e) => keyOf(e) !== null).map((e) => [keyOf(e), e]),
  );
  let next = parent.firstChild;
  for (const node of nodes) {
    const key = keyOf(node);
    const old = key === null ? next : keyed.get(key) ?? null;
    if (old && canUpdate(old, node)) {
      if (old === next) next = next.nextSibling;
      else parent.insertBefore(old, next);
      update(old, node);
    } else {
      parent.insertBefore(node, next);
    }
  }
  while (next) {
    const after = next.nextSibling;
    next.remove();
    next = after;
  }
}

/**
 * Return the key by which `patch` recognizes a node; null without one.
 * @param {Node} node @returns {string|null}
 */
function keyOf(node) {
  return node instanceof Element ? node.getAttribute("data-key") : null;
}

/**
 * Return whether two nodes have the same name and key.
 * @param {Node} a @param {Node} b
 */
function canUpdate(a, b) {
  return a.nodeName === b.nodeName && keyOf(a) === keyOf(b);
}

/**
 * Change an old node to be equal to a new one.
 * @param {Node} old @param {Node} node
 */
function update(old, node) {
  if (!(old instanceof Element && node instanceof Element)) {
    if (old.nodeValue !== node.nodeValue) old.nodeValue = node.nodeValue;
    return;
  }
  const same = node.getAttribute("data-same");
  if (same !== null && same === old.getAttribute("data-same")) return;
  for (const { name } of [...old.attributes]) {
    if (!node.hasAttribute(name) && !isKept(old, name)) old.removeAttribute(name);
  }
  for (const { name, value } of [...node.attributes]) {
    if (old.getAttribute(name) !== value && !isKept(old, name)) old.setAttribute(name, value);
  }
  const [target, source] = [/** @type {any} */ (old), /** @type {any} */ (node)];
  for (const name of HANDLERS) if (target[name] !== source[name]) target[name] = source[name];
  patch(old, [...node.childNodes]);
}

/**
 * Return whether an attribute is the viewer's own: an opened <details>.
 * @param {Element} e @param {string} name
 */
function isKept(e, name) {
  return name === "open" && e.localName === "details";
}
