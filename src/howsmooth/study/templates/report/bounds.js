// ---- all bounds at one sequence, on one logarithmic scale with the measurement

class Bounds {
  constructor(data) {
    this.data = data;
    this.chooser = new Chooser(
      find("bounds-fields"),
      fieldsOf(data.names, "n", "sample"),
      data.places,
      { start: data.places[0], all: false, changed: () => this.show() },
    );
    this.show();
  }

  show() {
    const place = this.data.places.find((one) => this.chooser.fits(one));
    const value = place.measured === null ? null : place.measured[0];
    const finite = place.rows.map((row) => row[2]).filter((bound) => bound !== null && bound > 0);
    if (value > 0) finite.push(value);
    const axis = finite.length ? new LogAxis(Math.min(...finite), Math.max(...finite), 4, 156) : null;
    const lines = place.rows.map(([label, above, bound, power, , source, here]) => make(
      "tr", {},
      make("td", { class: "name" }, this.data.labels[label]),
      make("td", {}, here ? "this sequence" : "the ball"),
      make("td", { class: "n" }, words(above, bound, power)),
      make("td", { class: "n" }, bound !== null && value > 0 ? shown(bound / value, 3) : ""),
      make("td", {}, this.mark(axis, above, bound, value)),
      make("td", { class: "source" }, this.data.sources[source]),
    ));
    find("bounds-rows").replaceChildren(...lines);
    find("bounds-said").textContent = `The ball has the radius ${shown(place.radius)}. ` + (place.measured === null
      ? "Not measured here."
      : `Measured here: ${shown(value, 6)}, interval ${shown(place.measured[1], 6)} to ${shown(place.measured[2], 6)}.`);
  }

  mark(axis, above, bound, value) {
    const picture = draw("svg", { width: 160, height: 16, "aria-hidden": "true" });
    if (axis === null) return picture;
    picture.append(draw("line", { x1: 4, x2: 156, y1: 8, y2: 8, class: "scale" }));
    if (value > 0) picture.append(draw("line", { x1: axis.at(value), x2: axis.at(value), y1: 1, y2: 15, class: "measured" }));
    if (bound > 0) {
      const x = axis.at(bound);
      const corners = above ? [[x - 5, 3], [x + 5, 3], [x, 12]] : [[x - 5, 13], [x + 5, 13], [x, 4]];
      picture.append(draw("polygon", { points: corners.join(" "), class: "bound" }));
    }
    return picture;
  }
}

function words(above, bound, power) {
  if (bound === null && power === null) return "none";
  return `${above ? "≤" : "≥"} ${bound === null ? `10^${shown(power)}` : shown(bound)}`;
}

function draw(tag, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}
