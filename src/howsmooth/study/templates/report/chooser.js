// ---- a row of menus, each offering what is there under the choices before it

class Chooser {
  // fields: [{key, label, name(value)}], records: objects with these keys, start: a value by key,
  // all: whether each menu also offers everything at once (a start of undefined).
  constructor(place, fields, records, { start, all, changed }) {
    this.fields = fields;
    this.records = records;
    this.all = all;
    this.choice = { ...start };
    this.menus = fields.map(({ key, label }, index) => {
      const menu = make("select", { "data-key": key });
      const box = make("label", { class: "field" }, make("span", {}, label), menu);
      menu.addEventListener("change", () => {
        this.choice[key] = menu.value === "" ? undefined : this.offered[index][Number(menu.value)];
        this.offer(index + 1);
        changed();
      });
      place.append(box);
      return { menu, box };
    });
    this.offered = [];
    this.offer(0);
  }

  // Fill the menus from one on; a choice that is not there any more becomes everything, or the first.
  offer(from) {
    for (let index = from; index < this.fields.length; index++) {
      const { key, label, name } = this.fields[index];
      const { menu, box } = this.menus[index];
      const fitting = this.records.filter((record) => this.fits(record, index));
      const values = [...new Set(fitting.map((record) => record[key]))].sort((a, b) => (a ?? -1) - (b ?? -1));
      this.offered[index] = values;
      if (!values.includes(this.choice[key])) this.choice[key] = this.all ? undefined : values[0];
      const options = values.map((value, place) => make("option", { value: String(place) }, name(value)));
      if (this.all && values.length > 1) options.unshift(make("option", { value: "" }, `every ${label}`));
      menu.replaceChildren(...options);
      const chosen = values.indexOf(this.choice[key]);
      menu.value = chosen >= 0 ? String(chosen) : this.all && values.length > 1 ? "" : "0";
      box.hidden = values.length < 2;
    }
  }

  fits(record, fields = this.fields.length) {
    for (let index = 0; index < fields; index++) {
      const { key } = this.fields[index];
      if (this.choice[key] !== undefined && record[key] !== this.choice[key]) return false;
    }
    return true;
  }
}

// The fields that lead to a record: which attention on which text, and then the last ones, by their keys.
function fieldsOf(names, ...last) {
  const unnamed = {
    layer: { label: "layer", name: (value) => `layer ${value}` },
    head: { label: "head", name: (value) => (value === null ? "all heads" : `head ${value}`) },
    n: { label: "length", name: (value) => `n = ${value}` },
    sample: { label: "sample", name: (value) => `sample ${value}` },
  };
  return ["model", "text", "scope", "layer", "head", ...last].map((key) => (
    { key, ...(unnamed[key] ?? { label: key, name: (value) => names[key][value] }) }
  ));
}
