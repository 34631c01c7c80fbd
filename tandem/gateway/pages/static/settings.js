/** The settings' form: remembered for the tab, read into values that both dialects understand. */

import { el } from "./dom.js";

/**
 * @typedef {{api: string, system: string, temperature?: number, topP?: number, maxTokens: number, seed?: number,
 *   stop?: string[], effort?: string, schema?: object, tools?: Tool[], toolChoice: string}} Settings
 * @typedef {{name: string, description?: string, parameters?: object}} Tool
 */

const PLACE = "tandem.settings";
const DEFAULT_MAX_TOKENS = 1024;
const NUMBERS = ["temperature", "topP", "maxTokens", "seed"];
export const EXAMPLE_TOOLS = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather in a city now.",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];

/** A field that cannot be understood; it is marked in the form. */
export class FieldError extends Error {}

export class SettingsForm {
  /** @param {HTMLFormElement} form @param {() => void} changed */
  constructor(form, changed) {
    this.form = form;
    this.changed = changed;
    this.restore();
    form.addEventListener("input", () => this.keep());
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  get api() {
    return this.form.elements.api.value;
  }

  /** @returns {Settings} @throws {FieldError} */
  read() {
    for (const field of this.form.elements) this.mark(field, "");
    const numbers = Object.fromEntries(NUMBERS.map((name) => [name, this.number(name)]));
    const { system, stop, effort, toolChoice } = this.form.elements;
    const stops = stop.value.split(" | ").filter((text) => text !== "");
    return {
      ...numbers,
      maxTokens: numbers.maxTokens ?? DEFAULT_MAX_TOKENS,
      api: this.api,
      system: system.value.trim(),
      stop: stops.length ? stops : undefined,
      effort: effort.value || undefined,
      schema: this.json("schema", (value) => value !== null && typeof value === "object" && !Array.isArray(value), "an object"),
      tools: this.tools(),
      toolChoice: toolChoice.value,
    };
  }

  insertExample() {
    this.form.elements.tools.value = JSON.stringify(EXAMPLE_TOOLS, null, 2);
    this.keep();
  }

  keep() {
    const values = Object.fromEntries(new FormData(this.form));
    sessionStorage.setItem(PLACE, JSON.stringify(values));
    this.changed();
  }

  restore() {
    let values = {};
    try {
      values = JSON.parse(sessionStorage.getItem(PLACE) ?? "{}");
    } catch {
      sessionStorage.removeItem(PLACE);
    }
    for (const [name, value] of Object.entries(values)) {
      if (this.form.elements[name]) this.form.elements[name].value = value;
    }
  }

  has(name) {
    return this.form.elements[name].value.trim() !== "";
  }

  number(name) {
    const field = this.form.elements[name];
    if (field.validity.badInput) this.refuse(field, "This is not a number.");
    return field.value === "" ? undefined : Number(field.value);
  }

  json(name, isRight, what) {
    const field = this.form.elements[name];
    if (!this.has(name)) return undefined;
    let value;
    try {
      value = JSON.parse(field.value);
    } catch (error) {
      this.refuse(field, `This is not JSON: ${error.message}`);
    }
    if (!isRight(value)) this.refuse(field, `This must be ${what}.`);
    return value;
  }

  /** Tools in either API's form. */
  tools() {
    const found = this.json("tools", Array.isArray, "an array of tools");
    if (!found?.length) return undefined;
    return found.map((tool) => {
      const { name, description, parameters, input_schema: schema } = tool?.function ?? tool ?? {};
      if (!name) this.refuse(this.form.elements.tools, "Every tool needs a name.");
      return { name, description, parameters: parameters ?? schema };
    });
  }

  refuse(field, words) {
    this.mark(field, words);
    for (let fold = field.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
    field.focus();
    throw new FieldError(words);
  }

  mark(field, words) {
    field.parentElement?.querySelector(".wrong")?.remove();
    if (words) {
      field.setAttribute("aria-invalid", "true");
      field.after(el("span", { class: "wrong", role: "alert" }, words));
    } else field.removeAttribute?.("aria-invalid");
  }
}
