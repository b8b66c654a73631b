// The documents that the server sends, as far as the page reads them. docs/json-schema.json has all.

/**
 * @typedef {"WAITING"|"REFUSED"|"UPLOADING"|"INCOMPLETE"|"COMPLETE"|"CONSOLIDATED"|"VERIFIED"|"DAMAGED"
 *   |"CONFLICT"|"RETIRED"} Status
 *
 * @typedef {object} Running  What a node does now; times in seconds, on the store's clock.
 * @property {string} kind
 * @property {string} node
 * @property {string} run
 * @property {string} checkpoint
 * @property {string} location
 * @property {string} state
 * @property {string} reason
 * @property {number} since
 * @property {number|null} until
 * @property {number} done
 * @property {number} total  0 where it is not known
 * @property {number} rate
 * @property {number|null} left
 * @property {number} at
 *
 * @typedef {{code: string, subject: string, severity: string, since: number|null, text: string,
 *   todo: string}} Alarm
 *
 * @typedef {{path: string, free: number, total: number, spool: number, budget: number}} Disk
 *
 * @typedef {object} StoreNode
 * @property {string} name
 * @property {string[]} roles
 * @property {string} state
 * @property {number} beat
 * @property {string} version
 * @property {string} host
 * @property {string[]} queue
 * @property {number} oldest
 * @property {number} rate
 * @property {number} sent_bytes
 * @property {Disk[]} disk
 * @property {Record<string, string>} watch
 * @property {string[]} errors
 * @property {string[]} notes
 * @property {Record<string, [string, string]>} blocked
 * @property {number|null} clock_offset
 *
 * @typedef {{checkpoint: string, location: string, step: number|null, status: Status,
 *   ended: number|null, arrived: number|null}} Newest
 *
 * @typedef {object} RunSummary
 * @property {string} run
 * @property {Record<string, number>} checkpoints
 * @property {number} bytes
 * @property {number} model_bytes
 * @property {string[]} nodes
 * @property {string} training
 * @property {Newest|null} newest
 * @property {Newest|null} verified
 *
 * @typedef {{location: string, step: number|null, status: Status}} Cell
 *
 * @typedef {object} OverviewDocument
 * @property {string} store
 * @property {number} at
 * @property {Alarm[]} alarms
 * @property {StoreNode[]} nodes
 * @property {RunSummary[]} runs
 * @property {number} bytes
 * @property {number} model_bytes
 * @property {{free: number, total: number}|null} room
 * @property {string[]} unreadable
 * @property {Running[]} [running]
 * @property {Record<string, Cell[]>} [strips]
 *
 * @typedef {object} Location
 * @property {string} run
 * @property {string} checkpoint
 * @property {string} location
 * @property {Status} status
 * @property {string|null} newer
 * @property {string[]} evidence
 * @property {string[]} lost
 * @property {string[]} doubts
 * @property {string[]} nodes
 * @property {number} bytes
 * @property {number|{files: number}} files
 * @property {boolean} model_complete
 * @property {boolean} resume_complete
 * @property {string[]} missing_for_resume
 * @property {string[]} missing_to_open
 * @property {{kind: string, text: string, tensors: number, first: string[]}[]} weights_findings
 * @property {boolean} model_damaged
 * @property {string|null} model
 * @property {string|null} hint
 * @property {{holds: boolean, verdict: string|null, level: string|null, when: number|null}} proof
 * @property {Running[]} [running]
 * @property {number|null} [step]
 * @property {number|null} [saved]
 * @property {number|null} [uploaded]
 * @property {number|null} [merged]
 * @property {number|null} [verified]
 * @property {number|null} [loss]
 * @property {number|null} [eval_loss]
 * @property {Record<string, number>} [metrics]
 * @property {boolean} [kept]
 * @property {Weights|null} [weights]
 *
 * @typedef {{tensors: number, elements: number, norm: number|null, min: number|null,
 *   max: number|null, zeros: number, nan: number, infinite: number}} GroupWeights
 * @typedef {{nonfinite: {tensors: number, first: string[]}, uncounted: number,
 *   groups: Record<string, GroupWeights>}} Weights
 *
 * @typedef {[number, number|null]} Point
 *
 * @typedef {object} RunDocument
 * @property {string} run
 * @property {number} [at]
 * @property {Location[]} checkpoints
 * @property {Record<string, Point[]>} curves
 * @property {Running[]} [running]
 *
 * @typedef {{name: string, bytes: number, node: string, rank: number|null}} StoredFile
 * @typedef {{file: string, ranges: [number, number][], tensors: string[]}} Damage
 *
 * @typedef {Omit<Location, "files"> & {at?: number, files: StoredFile[], files_total?: number,
 *   damage: Damage[], commands: Record<string, string>}} CheckpointDocument
 *
 * @typedef {{at?: number, nodes: StoreNode[], running?: Running[]}} NodesDocument
 */

export {};
