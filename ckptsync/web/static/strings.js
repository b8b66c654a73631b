// Every text of the page, in English and Chinese. `t` returns one in the viewer's language,
// with its arguments in place of `$1` and `$2`.

/** @type {Record<string, [english: string, chinese: string]>} */
const STRINGS = {
  skip: ["Skip to the content", "跳到内容"],
  overview: ["Overview", "概览"],
  nodes: ["Nodes", "节点"],
  runs: ["Runs", "运行"],
  run: ["Run", "运行"],
  "pages": ["Pages", "页面"],
  other: ["中文", "English"],
  "other-label": ["显示中文", "Show in English"],
  stored: ["Stored", "已存储"],
  models: ["consolidated models $1", "合并后的模型 $1"],
  room: ["Free space", "剩余空间"],
  of: ["of $1", "共 $1"],
  "free-of": ["$1 of $2 free", "剩余 $1，共 $2"],
  alarms: ["Alarms", "告警"],
  "no-alarms": ["No alarms", "没有告警"],
  critical: ["Critical", "严重"],
  warning: ["Warning", "警告"],
  todo: ["What to do:", "处理方法："],
  running: ["Running now", "正在进行"],
  "nothing-runs": ["Nothing is running.", "当前没有任务。"],
  upload: ["upload", "上传"],
  repair: ["repair", "修复"],
  consolidate: ["merge", "合并"],
  verify: ["verify", "校验"],
  retain: ["retention", "淘汰"],
  waiting: ["waiting", "等待中"],
  queued: ["queued", "排队中"],
  uploading: ["uploading", "上传中"],
  repairing: ["repairing", "修复中"],
  refused: ["refused", "已拒绝"],
  failed: ["failed", "失败"],
  "until": ["until $1", "直到 $1"],
  "time-left": ["$1 left", "剩余 $1"],
  "as-of": ["as of $1 ago", "$1前的数据"],
  "rate": ["$1/s", "$1/秒"],
  newest: ["Newest checkpoints", "最新检查点"],
  "newest-of": ["Newest checkpoints of $1, the newest on the right; arrow keys move", "$1 最近的检查点，最右边的最新；用方向键移动"],
  "latest-verified": ["Latest verified", "最新已校验"],
  "no-verified": ["none verified", "没有已校验的"],
  step: ["Step", "步数"],
  "step-n": ["step $1", "第 $1 步"],
  size: ["Size", "大小"],
  "training-runs": ["training", "训练中"],
  "training-ended": ["ended", "已结束"],
  "training-gone": ["stopped unexpectedly", "意外停止"],
  checkpoints: ["Checkpoints", "检查点"],
  checkpoint: ["Checkpoint", "检查点"],
  "n-checkpoints": ["$1 checkpoints", "$1 个检查点"],
  "no-runs": ["No runs yet", "还没有运行"],
  "no-runs-why": [
    "The store is empty. Start a worker on the machine that trains, or upload a checkpoint:",
    "存储是空的。请在训练机器上启动 worker，或上传一个检查点：",
  ],
  "no-nodes": ["No node has reported to this store yet.", "还没有节点向这个存储发送过心跳。"],
  "no-checkpoints": ["This run has no checkpoints.", "这个运行没有检查点。"],
  status: ["Status", "状态"],
  age: ["Age", "时间"],
  ago: ["$1 ago", "$1前"],
  seconds: ["$1 s", "$1 秒"],
  minutes: ["$1 min", "$1 分钟"],
  hours: ["$1 h", "$1 小时"],
  days: ["$1 d", "$1 天"],
  loss: ["Loss", "损失"],
  learning_rate: ["Learning rate", "学习率"],
  grad_norm: ["Gradient norm", "梯度范数"],
  "eval_loss": ["Eval loss", "评估损失"],
  curves: ["Curves", "曲线"],
  "no-curves": ["No trainer_state.json with a log is stored yet.", "存储里还没有带日志的 trainer_state.json。"],
  log: ["log scale", "对数坐标"],
  "curve-label": [
    "$1: $2 points, from $3 to $4, last $5 at step $6. Arrow keys move along the curve.",
    "$1：$2 个点，从 $3 到 $4，最后为 $5（第 $6 步）。用方向键沿曲线移动。",
  ],
  weights: ["Weights", "权重"],
  "norm-of": ["Norm: $1", "范数：$1"],
  norm: ["Norm", "范数"],
  group: ["Layers", "层"],
  "group-embeddings": ["embeddings", "嵌入层"],
  "group-attention": ["attention", "注意力层"],
  "group-mlp": ["MLP", "MLP 层"],
  "group-norm": ["normalization", "归一化层"],
  "group-head": ["head", "输出层"],
  "group-lora_a": ["LoRA A", "LoRA A"],
  "group-lora_b": ["LoRA B", "LoRA B"],
  "group-other": ["other", "其他"],
  least: ["Min", "最小值"],
  greatest: ["Max", "最大值"],
  nan: ["NaN", "NaN"],
  infinite: ["Infinite", "无穷"],
  zeros: ["Zeros", "零值"],
  findings: ["Findings", "异常"],
  timeline: ["Time line", "时间线"],
  saved: ["Saved", "保存"],
  uploaded: ["Uploaded", "上传"],
  merged: ["Merged", "合并"],
  verified: ["Verified", "校验"],
  after: ["after $1", "用时 $1"],
  model: ["Model", "模型"],
  opens: ["opens", "可加载"],
  "model-damaged": ["damaged", "已损坏"],
  "no-config": ["lacks files", "缺少文件"],
  resume: ["Resume", "续训"],
  yes: ["yes", "是"],
  no: ["no", "否"],
  kept: ["kept", "保留"],
  "kept-title": ["Kept", "保留"],
  why: ["Reason", "原因"],
  files: ["Files", "文件"],
  file: ["File", "文件"],
  "first-files": ["the first $1 of $2", "前 $1 个，共 $2 个"],
  node: ["Node", "节点"],
  rank: ["Rank", "Rank"],
  missing: ["What is missing", "缺少的内容"],
  damaged: ["What is damaged", "损坏的内容"],
  "missing-open": ["To open the model", "加载模型还缺"],
  "missing-resume": ["To resume the training", "断点续训还缺"],
  lost: ["Lost", "丢失"],
  doubts: ["Doubts", "疑点"],
  damage: ["Damage", "损坏"],
  ranges: ["Damaged bytes", "损坏的字节"],
  tensors: ["Tensors", "张量"],
  to: ["$1 to $2", "$1 到 $2"],
  commands: ["Commands", "命令"],
  "command-pull": ["Download the checkpoint", "下载检查点"],
  "command-pull_model": ["Download the model", "下载合并后的模型"],
  "command-verify": ["Verify again", "重新校验"],
  "command-repair": ["Repair", "修复"],
  "command-keep": ["Keep", "保留"],
  "command-ls": ["Show in the terminal", "在终端显示"],
  "command-open": ["Open", "打开"],
  copy: ["Copy", "复制"],
  copied: ["Copied", "已复制"],
  "not-copied": ["Select it and press Ctrl+C", "请选中后按 Ctrl+C"],
  state: ["State", "状态"],
  alive: ["alive", "在线"],
  silent: ["silent", "无响应"],
  stopped: ["stopped", "已停止"],
  unreadable: ["unreadable", "无法读取"],
  roles: ["Roles", "角色"],
  worker: ["worker", "worker"],
  head: ["head", "head"],
  verifier: ["verifier", "verifier"],
  queue: ["Queue", "队列"],
  "n-queued": ["$1, oldest waits $2", "$1 个，最早等待 $2"],
  sent: ["Sent", "已发送"],
  "rate-name": ["Rate", "速率"],
  spool: ["Spool", "暂存"],
  disks: ["Disks", "磁盘"],
  disk: ["Output directory", "输出目录"],
  watch: ["Watched by", "监视方式"],
  errors: ["Errors", "错误"],
  notes: ["Notes", "备注"],
  version: ["Version", "版本"],
  clock: ["clock is $1 off", "时钟偏差 $1"],
  live: ["live", "实时"],
  "lost-connection": ["No connection to ckptsync web: last seen $1 ago", "与 ckptsync web 的连接已断开：最后一次在 $1前"],
  "never-connected": ["No connection to ckptsync web", "无法连接 ckptsync web"],
  retrying: ["The page goes on by itself when the server answers.", "服务器恢复后页面会自动继续。"],
  "error-title": ["ckptsync could not show this", "ckptsync 无法显示此内容"],
  hint: ["hint:", "提示："],
  "file-of": ["a file written $1", "文件写于 $1"],
  "unreadable-records": ["Records that cannot be read", "无法读取的记录"],
  WAITING: ["WAITING", "等待中"],
  REFUSED: ["REFUSED", "已拒绝"],
  UPLOADING: ["UPLOADING", "上传中"],
  INCOMPLETE: ["INCOMPLETE", "不完整"],
  COMPLETE: ["COMPLETE", "完整"],
  CONSOLIDATED: ["CONSOLIDATED", "已合并"],
  VERIFIED: ["VERIFIED", "已校验"],
  DAMAGED: ["DAMAGED", "已损坏"],
  CONFLICT: ["CONFLICT", "冲突"],
  RETIRED: ["RETIRED", "已淘汰"],
};

/** @typedef {"en"|"zh"} Language */

const CHOSEN = "ckptsync-language";

/**
 * Return the language that the viewer chose earlier, or else the browser's.
 * @returns {Language}
 */
function preferred() {
  let chosen = null;
  try {
    chosen = localStorage.getItem(CHOSEN);
  } catch {
    // a browser may forbid storage; then the choice lasts as long as the page
  }
  return (chosen ?? navigator.language).toLowerCase().startsWith("zh") ? "zh" : "en";
}

let current = preferred();

/**
 * Return the current language.
 * @returns {Language}
 */
export function language() {
  return current;
}

/**
 * Change the language, also of later visits.
 * @param {Language} to
 */
export function chooseLanguage(to) {
  current = to;
  try {
    localStorage.setItem(CHOSEN, to);
  } catch {
    // see above
  }
}

/**
 * Return a text in the current language; a key without one is its own text.
 * @param {string} key @param {...string} values @returns {string}
 */
export function t(key, ...values) {
  const text = Object.hasOwn(STRINGS, key) ? STRINGS[key]?.[current === "zh" ? 1 : 0] ?? key : key;
  return text.replace(/\$(\d)/g, (_, n) => values[Number(n) - 1] ?? "");
}
