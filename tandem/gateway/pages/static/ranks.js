/** Ranks of workers that several processes make: which process on which host has which part, and when it was heard last. */

import { el } from "./dom.js";
import { ago, NONE } from "./format.js";
import { isHeard } from "./workers.js";

const mono = (words) => el("span", { class: "mono" }, words ?? NONE);
const SILENT_S = 1; // a rank shows four times a second that it runs

/** @typedef {Record<string, any>} Rank a member of a worker's `ranks`, with its worker's id, group and epoch */

/** @param {Record<string, any>[]} workers entries of /admin/workers @returns {Rank[]} none of workers that are one process */
export function ranksOf(workers) {
  return workers.filter((worker) => worker.ranks && isHeard(worker)).flatMap(({ worker_id, ranks }) =>
    ranks.members.map((member) => ({ ...member, worker_id, num_epochs: ranks.num_epochs, rows: ranks.experts?.by_rank[member.rank] })));
}

export const RANKS = [
  { title: "Worker", sort: (r) => `${r.worker_id} ${r.rank}`, cell: (r) => mono(r.worker_id) },
  { title: "Rank", isNumber: true, sort: (r) => r.rank, cell: (r) => r.rank },
  { title: "Host", sort: (r) => r.host ?? "", cell: (r) => r.host ?? "the worker's" },
  { title: "Pid", isNumber: true, cell: (r) => r.pid },
  { title: "Holds", cell: (r) => holds(r) },
  { title: "Experts' rows", isNumber: true, sort: (r) => r.rows ?? 0, cell: (r) => r.rows ?? NONE },
  { title: "Group", isNumber: true, sort: (r) => r.num_epochs, cell: (r) => r.num_epochs },
  { title: "Last heard", isNumber: true, sort: (r) => r.silent_s ?? 0, cell: (r) => heard(r) },
];

/** @param {Rank} rank */
function holds({ part, num_parts: numParts, stage, context }) {
  const parts = [
    stage === null ? "" : `layers of stage ${stage}`,
    context === null ? "" : `part ${context} of prompts`,
    numParts > 1 ? `heads ${part + 1} of ${numParts}` : "",
  ];
  return parts.filter(Boolean).join(", ") || NONE;
}

function heard({ rank, silent_s: silentS }) {
  if (rank === 0) return "leads";
  if (silentS === null) return NONE;
  return el("span", { class: silentS > SILENT_S ? "state warn" : "" }, `${ago(silentS)} ago`);
}
