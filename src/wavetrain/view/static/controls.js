// Mouse, touch and keyboard on the timeline. Turns events into calls of `act` and knows nothing of drawing.

import { LEFT, OVERVIEW, RIGHT } from "./layout.js";

const CLICK_PIXELS = 4;
const WHEEL_ZOOM = 0.0018; // e-folds a pixel of wheel
const KEY_ZOOM = 1.6;
const KEY_PAN = 0.15;

/** Keys, in the order of the help; `act` has a method of each name. */
export const KEYS = [
  { keys: ["+", "=", "w"], show: "+ or w", text: "zoom in", act: (act) => act.zoom(KEY_ZOOM) },
  { keys: ["-", "s"], show: "− or s", text: "zoom out", act: (act) => act.zoom(1 / KEY_ZOOM) },
  { keys: ["0"], show: "0", text: "fit all", act: (act) => act.fit() },
  { keys: ["ArrowLeft", "a"], show: "← or a", text: "earlier", act: (act) => act.pan(-KEY_PAN) },
  { keys: ["ArrowRight", "d"], show: "→ or d", text: "later", act: (act) => act.pan(KEY_PAN) },
  { keys: ["ArrowUp"], show: "↑", text: "scroll up", act: (act) => act.scroll(-60) },
  { keys: ["ArrowDown"], show: "↓", text: "scroll down", act: (act) => act.scroll(60) },
  { keys: ["Home"], show: "Home", text: "to the start", act: (act) => act.pan(-Infinity) },
  { keys: ["End"], show: "End", text: "to the end", act: (act) => act.pan(Infinity) },
  { keys: ["n"], show: "n", text: "select the rank's next action", act: (act) => act.step(1) },
  { keys: ["p"], show: "p", text: "select the one before", act: (act) => act.step(-1) },
  { keys: ["j"], show: "j", text: "select on the rank below", act: (act) => act.stepRank(1) },
  { keys: ["k"], show: "k", text: "select on the rank above", act: (act) => act.stepRank(-1) },
  { keys: ["f"], show: "f", text: "zoom to the selected action", act: (act) => act.focus() },
  { keys: ["c"], show: "c", text: "critical path", act: (act) => act.toggle("critical") },
  { keys: ["m"], show: "m", text: "messages", act: (act) => act.toggle("messages") },
  { keys: ["h"], show: "h", text: "memory held", act: (act) => act.toggle("memory") },
  { keys: ["?"], show: "?", text: "these keys", act: (act) => act.help() },
  { keys: ["Escape"], show: "Esc", text: "select nothing", act: (act) => act.clear() },
];

export function listenToKeys(act) {
  const table = new Map(KEYS.flatMap((entry) => entry.keys.map((key) => [key, entry])));
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target instanceof Element && event.target.closest("input, select, textarea, dialog[open]")) return;
    const entry = table.get(event.key.length === 1 ? event.key.toLowerCase() : event.key);
    if (!entry) return;
    event.preventDefault();
    entry.act(act);
  });
}

export function listenToPointer(canvas, act) {
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top, width: box.width };
  };
  const pointers = new Map();
  let drag = null; // {mode, x, y, moved}

  canvas.addEventListener("wheel", (event) => {
    const at = place(event);
    const step = event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? 400 : 1; // lines, pages, pixels
    const [dx, dy] = [event.deltaX * step, event.deltaY * step];
    const inPlot = at.x >= LEFT && at.x <= at.width - RIGHT;
    if (!inPlot || event.altKey) {
      act.scroll(dy);
    } else if (event.shiftKey || Math.abs(dx) > Math.abs(dy)) {
      act.drag(-(event.shiftKey && dx === 0 ? dy : dx));
    } else {
      act.zoomAt(Math.exp(-dy * (event.ctrlKey ? 5 : 1) * WHEEL_ZOOM), at.x);
    }
    event.preventDefault();
    act.hover(at.x, at.y);
  }, { passive: false });

  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    const at = place(event);
    pointers.set(event.pointerId, at);
    canvas.setPointerCapture(event.pointerId);
    const mode = at.y < OVERVIEW ? "overview" : event.shiftKey ? "range" : "pan";
    drag = { mode, start: at, last: at, moved: false };
    if (mode === "overview") act.overview(at.x);
  });

  canvas.addEventListener("pointermove", (event) => {
    const at = place(event);
    if (pointers.size === 2 && pointers.has(event.pointerId)) {
      pinch(pointers, event.pointerId, at, act);
      return;
    }
    if (!drag) {
      act.hover(at.x, at.y);
      return;
    }
    if (!drag.moved && Math.hypot(at.x - drag.start.x, at.y - drag.start.y) < CLICK_PIXELS) return;
    drag.moved = true;
    act.leave();
    canvas.classList.add("dragging");
    if (drag.mode === "overview") act.overview(at.x);
    else if (drag.mode === "range") act.range(drag.start.x, at.x);
    else {
      act.drag(at.x - drag.last.x);
      act.scroll(drag.last.y - at.y);
    }
    drag.last = at;
  });

  const release = (event) => {
    pointers.delete(event.pointerId);
    canvas.classList.remove("dragging");
    if (!drag) return;
    if (drag.mode === "range") act.range(drag.start.x, drag.last.x, drag.moved && event.type === "pointerup");
    if (!drag.moved && drag.mode === "pan" && event.type === "pointerup") act.click(drag.start.x, drag.start.y);
    drag = null;
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => act.leave());
  canvas.addEventListener("dblclick", (event) => act.focusAt(place(event).x, place(event).y));
}

/** Two fingers: zoom by how they part, pan by how their middle moves. */
function pinch(pointers, id, at, act) {
  const other = [...pointers].find(([key]) => key !== id)[1];
  const before = pointers.get(id);
  const apart = (a) => Math.max(20, Math.abs(a.x - other.x));
  act.drag((at.x - before.x) / 2);
  act.zoomAt(apart(at) / apart(before), (at.x + other.x) / 2);
  pointers.set(id, at);
}
