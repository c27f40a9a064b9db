// What the page says about an action, an idle stretch or a rank: a title and pairs of term and text. Plain text throughout.

import { KIND, upperBound } from "./model.js";
import { KIND_NAMES, describe, formatBytes, formatPercent, formatSeconds, plural, shortNumber } from "./words.js";

/** Details of the action `id`. */
export function actionDetails(model, id) {
  const action = model.action(id);
  const { kind, stage, microBatch, rank, start, end, lane, i } = action;
  const moment = (t) => formatSeconds(t, model.makespan);
  const name = KIND_NAMES[kind];
  return {
    title: `${name[0].toUpperCase()}${name.slice(1)} of stage ${stage}, micro-batch ${microBatch}`,
    swatch: { kind, chunk: lane.chunk[i] },
    pairs: [
      ["rank", `${rank}${lane.stages.length > 1 ? ` (its stage ${lane.chunk[i] + 1} of ${lane.stages.length})` : ""}`],
      ["time", `${moment(start)} – ${moment(end)}`],
      ["duration", formatSeconds(end - start)],
      ["waited for", waitedFor(model, action, moment)],
      ...sends(model, action, moment),
      ["holds", held(model, lane, kind === KIND.F ? start : end, kind === KIND.F ? "from its start" : "after it")],
      ...(action.critical ? [["critical path", "yes: the step is as long as it is because of it"]] : []),
    ],
  };
}

function waitedFor(model, action, moment) {
  const { lane, i, start } = action;
  const free = i ? lane.end[i - 1] : 0;
  const before = i ? model.action(action.id - 1) : null;
  const message = model.messageTo(action);
  const idle = start - free;
  if (message >= 0 && model.messages.end[message] > free) {
    const m = model.messages;
    const what = m.kind[message] === KIND.F ? "activations" : "gradients";
    const way = m.end[message] > m.sent[message] ? `, arrived ${moment(m.end[message])}` : "";
    return (
      `${what} of stage ${m.stage[message]} from rank ${m.source[message]}: sent ${moment(m.sent[message])}${way}; ` +
      `rank ${lane.rank} idled ${formatSeconds(idle)}`
    );
  }
  if (before === null) return idle > 0 ? `nothing: its input was there, it started ${moment(start)}` : "nothing: it starts the step";
  const ready = inputReady(model, action, message);
  const since = ready !== null && ready < free ? `; its input was there since ${moment(ready)}` : "";
  return `its rank, busy with ${describe(before)}, until ${moment(free)}${since}`;
}

function inputReady(model, action, message) {
  if (message >= 0) return model.messages.end[message];
  const needed = model.needs(action);
  return needed >= 0 ? model.action(needed).end : null;
}

function sends(model, action, moment) {
  const message = model.messageFrom(action);
  if (message < 0) return [];
  const m = model.messages;
  const what = m.kind[message] === KIND.F ? "activations" : "gradients";
  const queue = m.start[message] > m.sent[message] ? `, on the link ${moment(m.start[message])}` : "";
  const user = model.find(m.kind[message], m.stage[message] + (m.kind[message] === KIND.F ? 1 : -1), m.microBatch[message]);
  const used = user >= 0 ? `, used ${moment(model.action(user).start)}` : "";
  return [["sends", `${what} to rank ${m.target[message]}${queue}, there ${moment(m.end[message])}${used}`]];
}

function held(model, lane, t, when) {
  const now = lane.heldAt(t);
  const share = model.shareBytes[lane.rank];
  const inBytes = share !== 1 && share > 0 ? `, ${formatBytes(now * share)}` : "";
  const cap = lane.cap === null ? "" : ` of at most ${shortNumber(lane.cap)}`;
  return `${plural(now, "micro-batch")}${cap}${inBytes} ${when}`;
}

/** Details of an idle moment of a rank. */
export function idleDetails(model, rank, t) {
  const lane = model.lanes[rank];
  const next = upperBound(lane.start, t);
  const from = next ? lane.end[next - 1] : 0;
  const to = next < lane.count ? lane.start[next] : model.makespan;
  if (t > model.makespan || to <= from) return null;
  const moment = (time) => formatSeconds(time, model.makespan);
  const pairs = [
    ["time", `${moment(from)} – ${moment(to)}`],
    ["duration", formatSeconds(to - from)],
  ];
  if (next < lane.count) {
    const action = model.action(lane.offset + next);
    pairs.push(["next", describe(action)], ["waits for", waitedFor(model, action, moment)]);
  } else pairs.push(["next", "nothing: its last action is done (drain)"]);
  pairs.push(["holds", held(model, lane, t, "meanwhile")]);
  return { title: `Rank ${rank} idle${next === 0 ? " (warm-up)" : ""}`, pairs };
}

/** Details of a rank: its work, its idle time by cause and its memory. */
export function rankDetails(model, rank) {
  const idle = model.idle[rank];
  const total = idle.reduce((a, b) => a + b, 0);
  const lane = model.lanes[rank];
  const share = (value) => `${formatSeconds(value)} (${formatPercent(model.makespan > 0 ? value / model.makespan : 0)})`;
  return {
    title: `Rank ${rank}`,
    pairs: [
      [lane.stages.length === 1 ? "stage" : "stages", lane.stages.join(", ") || "none"],
      ["works", share(model.makespan - total)],
      ["idles", share(total)],
      ...model.causes.map((cause, at) => [`· ${cause}`, share(idle[at])]).filter((_, at) => idle[at] > 0),
      ["peak", `${plural(model.peaks[rank], "micro-batch")}${lane.cap === null ? "" : ` of at most ${shortNumber(lane.cap)}`}`],
    ],
  };
}
