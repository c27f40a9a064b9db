// The address of the page keeps settings, toggles and the stretch of time in view, so that a reload or a link shows the same.

const SHOW = "show";
const TIME = "t";

/** What the address says: {settings, show: names of toggles or null, time: [t0, t1] or null}. */
export function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  const [t0, t1] = (given.get(TIME) ?? "").split(",").map(Number);
  return {
    settings: Object.fromEntries([...given].filter(([key]) => key !== SHOW && key !== TIME)),
    show: given.has(SHOW) ? given.get(SHOW).split(",") : null,
    time: t1 > t0 ? [t0, t1] : null,
  };
}

/** Say it, without a new entry in the browser's history. Null: as it is by default. */
export function writeAddress({ settings, show, time }) {
  const said = new URLSearchParams(settings);
  if (show) said.set(SHOW, show.join());
  if (time) said.set(TIME, time.map((t) => Number(t.toPrecision(9))).join());
  const text = said.toString();
  if (text === location.hash.slice(1)) return;
  history.replaceState(null, "", text ? `#${text}` : location.pathname + location.search);
}
