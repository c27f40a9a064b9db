// A payload (see payload.py) as typed arrays, with the lookups that drawing and hovering need. Pure data, no DOM.

export const KIND = Object.freeze({ F: 0, B: 1, I: 2, W: 3 });
export const KIND_LETTERS = "FBIW";
const SLOT_OF_KIND = [0, 1, 1, 2]; // B and I are the same slot: the backward that the stage before waits for

function kindsOf(letters) {
  return Uint8Array.from(letters, (letter) => KIND[letter]);
}

/** First index whose value is > x. */
export function upperBound(values, x) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= x) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** One rank's actions in order of time. */
class Lane {
  constructor(rank, data, cap, offset) {
    this.rank = rank;
    this.offset = offset; // of its first action among all actions of the timeline
    this.count = data.start.length;
    this.kind = kindsOf(data.kind);
    this.stage = Int32Array.from(data.stage);
    this.microBatch = Int32Array.from(data.micro_batch);
    this.start = Float64Array.from(data.start);
    this.end = Float64Array.from(data.end);
    this.held = Float64Array.from(data.held);
    this.heldFrom = Float64Array.from(data.start, (start, i) => (this.kind[i] === KIND.F ? start : data.end[i]));
    this.cap = cap;
    this.critical = new Uint8Array(this.count);
    this.stages = [...new Set(data.stage)].sort((a, b) => a - b);
    const chunkOfStage = new Map(this.stages.map((stage, chunk) => [stage, chunk]));
    this.chunk = Uint8Array.from(data.stage, (stage) => Math.min(255, chunkOfStage.get(stage)));
  }

  /** Indices [from, to) of the actions that overlap the interval [t0, t1]. */
  visible(t0, t1) {
    return [upperBound(this.end, t0), upperBound(this.start, t1)];
  }

  /** What the rank holds at a time, in micro-batches of its share. */
  heldAt(t) {
    const after = upperBound(this.heldFrom, t);
    return after ? this.held[after - 1] : 0;
  }
}

/** One timeline, ready to be drawn. */
export class Model {
  constructor(payload) {
    this.name = payload.name;
    this.source = payload.source;
    this.ranks = payload.ranks;
    this.stages = payload.stages;
    this.microBatches = payload.micro_batches;
    this.waves = payload.waves;
    this.makespan = payload.makespan;
    this.ideal = payload.ideal;
    this.bubble = payload.bubble;
    this.peaks = payload.peak_activations;
    this.shareBytes = payload.share_bytes;
    this.causes = payload.idle.causes;
    this.idle = payload.idle.seconds; // [rank][cause]
    const mostIdle = Math.max(0, ...this.idle.map((seconds) => seconds.reduce((a, b) => a + b, 0)));
    this.mostIdle = this.makespan > 0 ? mostIdle / this.makespan : 0; // the share of the step that the idlest rank idles
    let offset = 0;
    this.lanes = payload.lanes.map((data, rank) => {
      const lane = new Lane(rank, data, payload.cap[rank], offset);
      offset += lane.count;
      return lane;
    });
    this.numActions = offset;
    this.chunks = Math.max(1, ...this.lanes.map((lane) => lane.stages.length));
    this.usedKinds = [0, 1, 2, 3].filter((kind) => this.lanes.some((lane) => lane.kind.includes(kind)));
    this.#indexActions();
    this.#indexMessages(payload.messages);
    this.#followCriticalPath(payload.critical);
    const caps = this.lanes.map((lane) => lane.cap).filter((cap) => cap !== null);
    this.mostHeld = Math.max(1e-9, ...this.peaks, ...caps);
  }

  #key(slot, stage, microBatch) {
    return (slot * this.stages + stage) * this.microBatches + microBatch;
  }

  #indexActions() {
    this.laneOf = new Uint16Array(this.numActions);
    this.place = new Int32Array(3 * this.stages * this.microBatches).fill(-1);
    for (const lane of this.lanes) {
      for (let i = 0; i < lane.count; i++) {
        const id = lane.offset + i;
        this.laneOf[id] = lane.rank;
        this.place[this.#key(SLOT_OF_KIND[lane.kind[i]], lane.stage[i], lane.microBatch[i])] = id;
      }
    }
  }

  #indexMessages(data) {
    // In order of time sent, so that the visible ones are a range.
    const order = Int32Array.from(data.sent.keys()).sort((a, b) => data.sent[a] - data.sent[b]);
    const pick = (ArrayType, column) => ArrayType.from(order, (i) => column[i]);
    const kinds = kindsOf(data.kind);
    this.messages = {
      count: order.length,
      kind: pick(Uint8Array, kinds),
      stage: pick(Int32Array, data.stage),
      microBatch: pick(Int32Array, data.micro_batch),
      source: pick(Int32Array, data.source),
      target: pick(Int32Array, data.target),
      sent: pick(Float64Array, data.sent),
      start: pick(Float64Array, data.start),
      end: pick(Float64Array, data.end),
    };
    const m = this.messages;
    const pairs = 2 * this.stages * this.microBatches;
    this.incoming = new Int32Array(pairs).fill(-1); // by slot, stage and micro-batch of the action that waits
    this.outgoing = new Int32Array(pairs).fill(-1); // by those of the action that sends
    this.longestMessage = 0;
    for (let i = 0; i < m.count; i++) {
      const slot = SLOT_OF_KIND[m.kind[i]];
      const target = m.stage[i] + (slot === 0 ? 1 : -1);
      this.outgoing[this.#key(slot, m.stage[i], m.microBatch[i])] = i;
      if (target >= 0 && target < this.stages) this.incoming[this.#key(slot, target, m.microBatch[i])] = i;
      this.longestMessage = Math.max(this.longestMessage, m.end[i] - m.sent[i]);
    }
  }

  #followCriticalPath({ rank, index }) {
    this.pathRuns = []; // stretches on one rank, in order of time; the path crosses between them
    for (let i = 0; i < rank.length; i++) {
      const lane = this.lanes[rank[i]];
      const last = this.pathRuns.at(-1);
      lane.critical[index[i]] = 1;
      if (last && last.rank === rank[i]) last.end = lane.end[index[i]];
      else this.pathRuns.push({ rank: rank[i], start: lane.start[index[i]], end: lane.end[index[i]] });
    }
    this.pathRunEnds = Float64Array.from(this.pathRuns, (run) => run.end);
  }

  /** An action by its number among all of the timeline. */
  action(id) {
    const lane = this.lanes[this.laneOf[id]];
    const i = id - lane.offset;
    return {
      id, lane, i, rank: lane.rank, kind: lane.kind[i], stage: lane.stage[i], microBatch: lane.microBatch[i],
      start: lane.start[i], end: lane.end[i], critical: lane.critical[i] === 1,
    };
  }

  /** The number of the action of a kind, or -1. */
  find(kind, stage, microBatch) {
    if (stage < 0 || stage >= this.stages || microBatch < 0 || microBatch >= this.microBatches) return -1;
    return this.place[this.#key(SLOT_OF_KIND[kind], stage, microBatch)];
  }

  /** The message that an action waits for, or -1. W waits for no message. */
  messageTo(action) {
    return action.kind === KIND.W ? -1 : this.incoming[this.#key(SLOT_OF_KIND[action.kind], action.stage, action.microBatch)];
  }

  /** The message that an action sends, or -1. */
  messageFrom(action) {
    return action.kind === KIND.W ? -1 : this.outgoing[this.#key(SLOT_OF_KIND[action.kind], action.stage, action.microBatch)];
  }

  /** The action whose result an action needs from another stage, or -1. */
  needs(action) {
    const { kind, stage, microBatch } = action;
    if (kind === KIND.F) return this.find(KIND.F, stage - 1, microBatch);
    if (kind === KIND.W) return this.find(KIND.I, stage, microBatch);
    return stage + 1 < this.stages ? this.find(KIND.B, stage + 1, microBatch) : this.find(KIND.F, stage, microBatch);
  }

  /** Indices [from, to) of messages that may be under way in [t0, t1]. */
  visibleMessages(t0, t1) {
    return [upperBound(this.messages.sent, t0 - this.longestMessage - 1e-12), upperBound(this.messages.sent, t1)];
  }

  /** The action on a rank at a time, or the nearest one within a tolerance, or -1. */
  actionAt(rank, t, tolerance) {
    const lane = this.lanes[rank];
    const after = upperBound(lane.start, t);
    if (after && lane.end[after - 1] > t) return lane.offset + after - 1;
    const before = after ? t - lane.end[after - 1] : Infinity;
    const ahead = after < lane.count ? lane.start[after] - t : Infinity;
    if (Math.min(before, ahead) > tolerance) return -1;
    return lane.offset + (before <= ahead ? after - 1 : after);
  }

  /** Idle seconds by cause, all ranks together. */
  idleByCause() {
    return this.causes.map((_, cause) => this.idle.reduce((sum, seconds) => sum + seconds[cause], 0));
  }
}
