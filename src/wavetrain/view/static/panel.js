// The control panel of a served page: settings, and what the server makes of them.
//
// What is shown is always either current, or marked as not: from the moment a setting changes until its result has arrived the
// panel says "busy", and where the server refuses it says why and stays "refused".

import { element } from "./dom.js";

const DEBOUNCE_MS = 250;
const BUSY_RETRIES = 4;

/** Keys are those of the server's query. */
const FIELDS = [
  { group: "schedules", key: "schedule", label: "schedule", choices: "names" },
  { group: "schedules", key: "compare", label: "compare with", choices: "names", none: "nothing" },
  { group: "pipeline", key: "ranks", label: "ranks P", step: 1, least: 1 },
  { group: "pipeline", key: "micro_batches", label: "micro-batches B", step: 1, least: 1 },
  { group: "pipeline", key: "waves", label: "waves W", step: 1, least: 1, hint: "auto" },
  { group: "seconds per rank and micro-batch", key: "forward", label: "F, s", least: 0 },
  { group: "seconds per rank and micro-batch", key: "backward_input", label: "I, s", least: 0 },
  { group: "seconds per rank and micro-batch", key: "backward_weight", label: "W, s", least: 0 },
  { group: "limits", key: "hop_latency", label: "hop latency, s", least: 0 },
  { group: "limits", key: "memory_cap", label: "memory cap", least: 0, hint: "none" },
];
const TITLES = {
  forward: "forward: seconds of one micro-batch on one rank's share of the model",
  backward_input: "gradient of the input: seconds of one micro-batch on one rank's share; B takes I and W",
  backward_weight: "gradient of the weights: seconds of one micro-batch on one rank's share; B takes I and W",
  waves: "times that a micro-batch runs down and back over the ranks, for schedules that have waves",
  memory_cap: "micro-batches of a rank's share whose activations a rank may hold; empty: no cap",
  hop_latency: "seconds for a message to cross to another rank",
};

export class Panel {
  #inputs = new Map();
  #timer = 0;
  #request = null;
  #asked = null; // the settings of the request that is under way or was answered
  #message;
  #onState;
  #onResult;

  /**
   * @param form where the controls go
   * @param live {names, settings} from the server
   * @param onState called with "busy", "current" or "refused"
   * @param onResult called with the payloads that the server gave, and the settings they are for
   */
  constructor(form, live, onState, onResult) {
    this.#onState = onState;
    this.#onResult = onResult;
    const groups = new Map();
    for (const field of FIELDS) {
      const input = field.choices ? choice(field, live[field.choices]) : number(field);
      input.addEventListener("input", () => this.#changed());
      input.addEventListener("change", () => this.#changed()); // some tools set a choice without an input event
      this.#inputs.set(field.key, input);
      if (!groups.has(field.group)) groups.set(field.group, element("fieldset", {}, element("legend", {}, field.group)));
      groups.get(field.group).append(element("label", { title: TITLES[field.key] }, element("span", {}, field.label), input));
    }
    this.#message = element("p", { class: "refusal", role: "alert", id: "refusal", hidden: true });
    form.replaceChildren(...groups.values(), this.#message);
    form.addEventListener("submit", (event) => event.preventDefault());
    this.settings = live.settings;
  }

  /** What the controls say; empty ones are left out. */
  get settings() {
    const given = {};
    for (const [key, input] of this.#inputs) if (input.value.trim() !== "") given[key] = input.value.trim();
    return given;
  }

  set settings(values) {
    for (const [key, input] of this.#inputs) {
      const value = values[key] ?? "";
      if (input.tagName === "SELECT" && value !== "" && ![...input.options].some((option) => option.value === value)) {
        input.append(element("option", { value }, value)); // unknown: the server says what it thinks of it
      }
      input.value = value;
      if (input.tagName === "SELECT" && input.selectedIndex < 0) input.selectedIndex = 0;
    }
  }

  /** Simulate what the controls say, now. */
  run() {
    clearTimeout(this.#timer);
    this.#request?.abort();
    this.#request = new AbortController();
    this.#asked = this.#written();
    this.#onState("busy");
    const odd = [...this.#inputs].find(([, input]) => input.validity.badInput);
    if (odd) this.#refuse(`${odd[0]} is not a number`, odd[0]);
    else this.#ask(this.settings, this.#request.signal, BUSY_RETRIES);
  }

  #written() {
    return JSON.stringify([...this.#inputs.values()].map((input) => [input.value, input.validity.badInput]));
  }

  #changed() {
    if (this.#written() === this.#asked) return;
    clearTimeout(this.#timer);
    this.#request?.abort();
    this.#asked = null;
    this.#onState("busy");
    this.#timer = setTimeout(() => this.run(), DEBOUNCE_MS);
  }

  async #ask(settings, signal, retries) {
    try {
      const answer = await fetch(`api/simulate?${new URLSearchParams(settings)}`, { signal, cache: "no-store" });
      const body = await answer.json();
      if (signal.aborted) return;
      if (answer.ok) {
        this.#refuse(null);
        this.#onResult(body.timelines, settings);
        this.#onState("current");
      } else if (answer.status === 503 && retries > 0) {
        this.#timer = setTimeout(() => this.#ask(settings, signal, retries - 1), 1000);
      } else this.#refuse(body.error ?? `the server answered ${answer.status}`);
    } catch (error) {
      if (signal.aborted) return;
      this.#refuse(error instanceof TypeError ? "no answer: is `wavetrain view` still running?" : String(error));
    }
  }

  #refuse(text, key = null) {
    this.#message.hidden = text === null;
    this.#message.textContent = text ?? "";
    const named = key ?? [...this.#inputs.keys()].find((name) => text?.startsWith(name));
    for (const [name, input] of this.#inputs) input.setAttribute("aria-invalid", String(text !== null && name === named));
    if (text !== null) this.#onState("refused");
  }
}

function choice({ key, none }, names) {
  const select = element("select", { name: key });
  if (none) select.append(element("option", { value: "" }, none));
  for (const name of names) select.append(element("option", { value: name }, name));
  return select;
}

function number({ key, step, least, hint }) {
  return element("input", { name: key, type: "number", step: step ?? "any", min: least, placeholder: hint, autocomplete: "off" });
}
