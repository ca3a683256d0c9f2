// ---- small tools; whatever comes from the data is written as text, never as markup

const find = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const row = (...cells) => make("tr", {}, ...cells.map(([name, content]) => make("td", { class: name }, content)));

// Show rows in the body of a table; on a phone each cell says the name of its column.
function fill(id, rows) {
  const body = find(id);
  const names = [...body.closest("table").tHead.rows[0].cells].map((cell) => cell.textContent);
  for (const one of rows) [...one.cells].forEach((cell, index) => { cell.dataset.name = names[index]; });
  body.replaceChildren(...rows);
}

// A number with so many digits: a true minus sign, no zeros at the end. Lower limits are rounded by "floor" and
// upper limits by "ceil", so that what is shown is still a limit.
function shown(value, digits = 4, roundingMode = "halfExpand") {
  if (value === null) return "none";
  const format = new Intl.NumberFormat("en", { maximumSignificantDigits: digits, useGrouping: false, roundingMode });
  return String(Number(format.format(value))).replace("-", "−");
}

const interval = (lower, upper) => `interval ${shown(lower, 6, "floor")} to ${shown(upper, 6, "ceil")}`;

// The order of numbers; null, which is no head or no radius, comes first.
const upwards = (a, b) => (a ?? -1) - (b ?? -1);

// What needs a script, and has data on this page, is shown once it runs.
function begin(id, sections, start) {
  const data = find(`${id}-data`);
  if (data === null) return;
  for (const section of sections) find(section).hidden = false;
  start(JSON.parse(data.textContent));
}

// What is folded away on the screen is printed as well.
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details:not([open])")) details.open = details.dataset.opened = true;
});
addEventListener("afterprint", () => {
  for (const details of document.querySelectorAll("details[data-opened]")) {
    details.open = false;
    delete details.dataset.opened;
  }
});

// ---- a row of menus, each offering what is there under the choices before it

const NAMES = {
  layer: (value) => `layer ${value}`,
  head: (value) => (value === null ? "all heads" : `head ${value}`),
  n: (value) => `n = ${value}`,
  sample: (value) => `sample ${value}`,
  radius: (value) => `R = ${shown(value)}`,
};

class Chooser {
  // keys: of the records, a menu each; names: of the values that are numbers of names; choice: a value by key,
  // to begin with; all: whether each menu also offers every value at once (a choice of undefined).
  constructor(place, keys, names, records, { choice, all, changed }) {
    Object.assign(this, { place, keys, names, records, choice: { ...choice }, all, offered: [] });
    this.menus = keys.map((key, index) => this.menu(key === "n" ? "length" : key, key, (menu) => {
      this.choice[key] = menu.value === "" ? undefined : this.offered[index][Number(menu.value)];
      this.offer(index + 1);
      changed();
    }));
    this.offer(0);
  }

  // Put a menu with a label behind the others.
  menu(label, key, chosen) {
    const menu = make("select", { "data-key": key });
    menu.addEventListener("change", () => chosen(menu));
    this.place.append(make("label", { class: "field" }, make("span", {}, label), menu));
    return menu;
  }

  name(key, value) {
    return key in this.names ? this.names[key][value] : NAMES[key](value);
  }

  // Fill the menus from one on; a choice that is not there any more becomes every value, or the first.
  offer(from) {
    for (let index = from; index < this.keys.length; index++) {
      const [key, menu] = [this.keys[index], this.menus[index]];
      const fitting = this.records.filter((record) => this.fits(record, index));
      const values = [...new Set(fitting.map((record) => record[key]))].sort(upwards);
      this.offered[index] = values;
      if (!values.includes(this.choice[key])) this.choice[key] = this.all ? undefined : values[0];
      const options = values.map((value, place) => make("option", { value: place }, this.name(key, value)));
      if (this.all && values.length > 1) options.unshift(make("option", { value: "" }, `every ${key}`));
      menu.replaceChildren(...options);
      menu.selectedIndex = values.indexOf(this.choice[key]) + options.length - values.length;
      menu.parentElement.hidden = values.length < 2;
    }
  }

  // Whether a record has what is chosen in the first menus.
  fits(record, menus = this.keys.length) {
    return this.keys.slice(0, menus).every((key) => this.choice[key] === undefined || record[key] === this.choice[key]);
  }
}

// Menus that lead to one record, which is shown.
function chooseOne(id, names, records, choice, show) {
  const keys = ["model", "text", "scope", "layer", "head", "n", "sample"];
  const changed = () => show(records.find((record) => chooser.fits(record)));
  const chooser = new Chooser(find(`${id}-fields`), keys, names, records, { choice, changed });
  changed();
}
