// Elements from data. Text only ever becomes a text node: names of timelines come from files that others wrote.

/** An element with attributes (null or false: none) and children (strings become text). */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children);
  return made;
}

/** A small square of a colour. Set through the style object: the page's policy refuses style attributes. */
export function swatch(color) {
  const made = element("span", { class: "swatch", "aria-hidden": "true" });
  made.style.background = color;
  return made;
}

/** Details (see details.js) as a heading and a list of terms. */
export function detailsList({ title, swatch: of, pairs }, palette) {
  const heading = element("div", { class: "details-title" }, title);
  if (of) heading.prepend(swatch(palette.fills[of.kind][of.chunk].css));
  const list = element("dl");
  for (const [term, text] of pairs) list.append(element("div", {}, element("dt", {}, term), element("dd", {}, text)));
  return [heading, list];
}
