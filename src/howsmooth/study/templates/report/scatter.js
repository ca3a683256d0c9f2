// ---- the scatter plot: all points on one canvas, what is pointed at on another above it

const AXES = {
  n: "sequence length n (tokens)",
  radius: "radius R (root mean square token norm)",
};
const REFERENCES = [[0.25, [6, 4]], [0.5, [2, 3]]];
const MOST_LINES = 60;

class Scatter {
  constructor(data) {
    this.names = data.names;
    this.groups = data.groups;
    this.points = data.points;
    this.level = data.level;
    this.x = "n";
    this.current = -1;
    this.base = find("scatter-points");
    this.top = find("scatter-pointed");
    this.box = find("scatter");
    this.tip = find("scatter-tip");

    this.chooser = new Chooser(
      find("scatter-fields"),
      fieldsOf(this.names, "quantity"),
      this.groups,
      { start: { model: 0, text: 0, scope: 0, quantity: 0 }, all: true, changed: () => this.changed() },
    );
    this.xMenu = this.menu("across", { n: "length n", radius: "radius R" }, (value) => { this.x = value; });
    this.colourMenu = this.menu("colour", {
      radius: "radius R", n: "length n", layer: "layer", head: "head",
      model: "model", text: "text", scope: "scope", quantity: "quantity",
    }, (value) => { this.colour = value; });
    for (const option of this.colourMenu.options) {
      const values = new Set(this.groups.map((group) => group[option.value]));
      option.hidden = option.disabled = !(option.value in this.points) && values.size < 2;
    }
    this.colour = new Set(this.groups.map((group) => group.layer)).size > 1 ? "layer" : "radius";
    this.colourMenu.value = this.colour;

    this.box.addEventListener("pointermove", (event) => this.pointed(event));
    this.box.addEventListener("pointerdown", (event) => this.pointed(event));
    // A finger that is lifted leaves, too; what it has chosen stays.
    this.box.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") this.show(-1); });
    this.box.addEventListener("keydown", (event) => this.key(event));
    this.box.addEventListener("blur", () => this.show(-1));
    darkness.addEventListener("change", () => this.paint());
    this.filter();
    new ResizeObserver(() => this.paint()).observe(this.box);
  }

  menu(label, options, chosen) {
    const menu = make("select", { "data-key": label });
    for (const [value, words] of Object.entries(options)) menu.append(make("option", { value }, words));
    menu.addEventListener("change", () => { chosen(menu.value); this.changed(); });
    find("scatter-fields").append(make("label", { class: "field" }, make("span", {}, label), menu));
    return menu;
  }

  changed() {
    this.filter();
    this.paint();
  }

  // ---- what is shown

  filter() {
    const { group, value, radius } = this.points;
    const fits = this.groups.map((one) => this.chooser.fits(one));
    this.visible = [];
    this.zeros = 0;
    for (let index = 0; index < group.length; index++) {
      if (!fits[group[index]]) continue;
      if (value[index] > 0 && (this.x !== "radius" || radius[index] > 0)) this.visible.push(index);
      else this.zeros += 1;
    }
    const present = new Set(this.visible.map((index) => group[index]));
    this.chosen = this.groups.filter((one, index) => present.has(index));
    this.show(-1);
    this.columns = null;
    this.summarise();
  }

  summarise() {
    const words = [`${this.visible.length} measurements`];
    const loose = this.visible.filter((index) => !this.points.converged[index]).length;
    if (loose) words.push(`, ${loose} of them not converged (hollow, with their interval)`);
    if (this.zeros) words.push(`; ${this.zeros} more are zero and cannot be shown on log axes`);
    words.push(". ");
    const fitted = this.chosen.filter((one) => one.fit).sort((a, b) => a.fit.slope - b.fit.slope);
    if (fitted.length === 1) words.push(`Exponent of ${this.place(fitted[0])}: ${this.exponent(fitted[0].fit)}.`);
    else if (fitted.length) {
      const [least, most] = [fitted[0], fitted[fitted.length - 1]];
      words.push(`${fitted.length} exponents, from ${fixed(least.fit.slope, 3)} (${this.amongChosen(least)}) `
        + `to ${fixed(most.fit.slope, 3)} (${this.amongChosen(most)}).`);
    }
    if (fitted.length > MOST_LINES) words.push(` Their lines are drawn for ${MOST_LINES} or fewer.`);
    find("scatter-summary").textContent = words.join("");
  }

  place(group) {
    return `layer ${group.layer}${group.head === null ? "" : `, head ${group.head}`}`;
  }

  // A group's place, with whatever else tells it from the others that are shown.
  amongChosen(group) {
    const several = Object.keys(this.names).filter((axis) => this.chosen.some((one) => one[axis] !== group[axis]));
    return [this.place(group), ...several.map((axis) => this.names[axis][group[axis]])].join(", ");
  }

  exponent(fit) {
    const p = fit.quarter < 0.001 ? "below 0.001" : fixed(fit.quarter, 3);
    return `${fixed(fit.slope, 3)}, ${this.level} interval ${fixed(fit.low, 3)} to ${fixed(fit.high, 3)}, p for 1/4 ${p}`;
  }

  describe(index) {
    const { group, n, sample, radius, value, lower, upper, converged } = this.points;
    const one = this.groups[group[index]];
    const quantity = this.names.quantity[one.quantity];
    const interval = lower[index] === null || upper[index] === null
      ? "no interval"
      : `interval ${shown(lower[index], 6)} to ${shown(upper[index], 6)}`;
    return [
      `${this.names.model[one.model]}, ${this.place(one)}, scope ${this.names.scope[one.scope]}`,
      `text ${this.names.text[one.text]}, sample ${sample[index]}`,
      `n = ${n[index]}, radius ${shown(radius[index])}`,
      `${quantity === "measured" ? "constant" : quantity} ${shown(value[index], 6)}, ${interval}`
        + (converged[index] ? "" : ", not converged"),
      one.fit ? `exponent ${this.exponent(one.fit)}` : `no exponent: ${one.note}`,
    ];
  }

  // ---- drawing

  paint() {
    const width = Math.floor(this.box.clientWidth);
    if (width < 50) return;
    const height = Math.round(Math.min(540, Math.max(340, 0.58 * width)));
    this.ratio = devicePixelRatio || 1;
    for (const canvas of [this.base, this.top]) {
      canvas.width = Math.round(width * this.ratio);
      canvas.height = Math.round(height * this.ratio);
    }
    this.box.style.height = `${height}px`;
    this.width = width;
    this.radius = width < 500 ? 2.6 : 3.6;
    this.colours = scaleOfColours(this.colour, this);
    this.frame = { left: 62, right: width - (this.colours.bar ? 78 : 14), top: 14, bottom: height - 48 };
    const context = this.base.getContext("2d");
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.font = "12px system-ui, sans-serif";
    this.legend();
    if (this.visible.length === 0) {
      context.fillStyle = themed("soft");
      context.fillText("Nothing fits these choices.", this.frame.left, this.frame.top + 20);
      return;
    }
    this.setAxes();
    this.drawAxes(context);
    context.save();
    context.beginPath();
    const { left, right, top, bottom } = this.frame;
    context.rect(left, top, right - left, bottom - top);
    context.clip();
    if (this.x === "n") this.drawReferences(context);
    this.drawPoints(context);
    if (this.x === "n") this.drawFits(context);
    context.restore();
    if (this.colours.bar) drawBar(context, this.colours, this.frame);
    this.show(this.current);
  }

  setAxes() {
    const { value, lower, upper, converged } = this.points;
    const across = this.points[this.x];
    let [xLow, xHigh, yLow, yHigh] = [Infinity, 0, Infinity, 0];
    for (const index of this.visible) {
      xLow = Math.min(xLow, across[index]);
      xHigh = Math.max(xHigh, across[index]);
      const whole = converged[index] || !(lower[index] > 0);
      yLow = Math.min(yLow, whole ? value[index] : lower[index]);
      yHigh = Math.max(yHigh, converged[index] || upper[index] === null ? value[index] : upper[index]);
    }
    this.xAxis = new LogAxis(xLow, xHigh, this.frame.left, this.frame.right);
    this.yAxis = new LogAxis(yLow, yHigh, this.frame.bottom, this.frame.top);
    this.xs = Float32Array.from(this.visible, (index) => this.xAxis.at(across[index]));
    this.ys = Float32Array.from(this.visible, (index) => this.yAxis.at(value[index]));
  }

  drawAxes(context) {
    const { left, right, top, bottom } = this.frame;
    context.lineWidth = 1;
    context.strokeStyle = themed("line");
    context.fillStyle = themed("ink");
    context.textAlign = "center";
    context.textBaseline = "top";
    for (const tick of this.xAxis.ticks(Math.max(3, Math.floor((right - left) / 48)))) {
      const x = Math.round(this.xAxis.at(tick)) + 0.5;
      line(context, [[x, top], [x, bottom]]);
      context.fillText(shown(tick), x, bottom + 6);
    }
    context.fillText(AXES[this.x], (left + right) / 2, bottom + 26, right - left);
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const tick of this.yAxis.ticks(8)) {
      const y = Math.round(this.yAxis.at(tick)) + 0.5;
      line(context, [[left, y], [right, y]]);
      context.fillText(shown(tick), left - 6, y);
    }
    context.strokeStyle = themed("soft");
    line(context, [[left, top], [left, bottom], [right, bottom]]);
    context.save();
    context.translate(13, (top + bottom) / 2);
    context.rotate(-Math.PI / 2);
    context.textAlign = "center";
    context.fillText("local Lipschitz constant", 0, 0);
    context.restore();
  }

  drawReferences(context) {
    let logs = 0;
    for (const index of this.visible) logs += Math.log(this.points.value[index]);
    const { low, high } = this.xAxis;
    const middle = Math.sqrt(low * high);
    const one = this.chosen.length === 1 ? this.chosen[0].fit : null;
    const height = one ? Math.exp(one.intercept + one.slope * Math.log(middle)) : Math.exp(logs / this.visible.length);
    context.strokeStyle = themed("soft");
    context.lineWidth = 1.3;
    for (const [slope, dashes] of REFERENCES) {
      context.setLineDash(dashes);
      line(context, [low, high].map((n) => [this.xAxis.at(n), this.yAxis.at(height * (n / middle) ** slope)]));
    }
    context.setLineDash([]);
  }

  drawFits(context) {
    const fitted = this.chosen.filter((one) => one.fit);
    if (fitted.length > MOST_LINES) return;
    for (const one of fitted) {
      const { intercept, slope, n_min, n_max } = one.fit;
      const ends = [n_min, n_max].map(
        (n) => [this.xAxis.at(n), this.yAxis.at(Math.exp(intercept + slope * Math.log(n)))],
      );
      context.lineWidth = 3.6;
      context.strokeStyle = themed("paper");
      line(context, ends);
      context.lineWidth = 2;
      context.strokeStyle = fitted.length === 1 ? themed("fit") : this.colours.ofGroup(one) ?? themed("ink");
      line(context, ends);
    }
  }

  drawPoints(context) {
    const { group, value, lower, upper, converged } = this.points;
    const sprites = new Map();
    context.save();
    context.setTransform(1, 0, 0, 1, 0, 0);
    this.visible.forEach((index, place) => {
      const [kind, colour, shape] = this.colours.of(index, this.groups[group[index]]);
      const key = kind * 2 + converged[index];
      if (!sprites.has(key)) sprites.set(key, this.sprite(colour, shape, !converged[index]));
      const sprite = sprites.get(key);
      const [x, y] = [this.xs[place] * this.ratio, this.ys[place] * this.ratio];
      if (!converged[index] && lower[index] > 0 && upper[index] !== null) {
        context.strokeStyle = colour;
        context.lineWidth = 1.2 * this.ratio;
        const ends = [lower[index], upper[index]].map((end) => this.yAxis.at(end) * this.ratio);
        line(context, ends.map((end) => [x, end]));
      }
      context.drawImage(sprite, Math.round(x - sprite.width / 2), Math.round(y - sprite.height / 2));
    });
    context.restore();
  }

  sprite(colour, shape, hollow) {
    const size = Math.ceil((2.5 * this.radius + 3) * this.ratio);
    const canvas = document.createElement("canvas");
    canvas.width = canvas.height = size;
    const context = canvas.getContext("2d");
    trace(context, shape, size / 2, size / 2, this.radius * this.ratio);
    context.fillStyle = hollow ? themed("paper") : colour;
    context.fill();
    context.lineWidth = (hollow ? 1.5 : 0.7) * this.ratio;
    context.strokeStyle = hollow ? colour : themed("rim");
    context.stroke();
    return canvas;
  }

  // ---- the legend

  legend() {
    const items = [];
    if (this.colour in this.names) {
      const present = [...new Set(this.chosen.map((one) => one[this.colour]))].sort((a, b) => a - b);
      for (const value of present) {
        const swatch = make("canvas", { width: "32", height: "32", "aria-hidden": "true" });
        const context = swatch.getContext("2d");
        trace(context, SHAPES[value % SHAPES.length], 16, 16, 10);
        context.fillStyle = named(value);
        context.fill();
        items.push(make("li", {}, swatch, this.names[this.colour][value]));
      }
    }
    find("scatter-legend").replaceChildren(...items);
    const fitted = this.chosen.filter((one) => one.fit).length;
    find("scatter-lines").hidden = this.x !== "n" || this.visible.length === 0;
    find("scatter-fitted").hidden = fitted === 0 || fitted > MOST_LINES;
    find("scatter-fitted").classList.toggle("single", fitted === 1);
  }

  // ---- pointing

  pointed(event) {
    if (this.visible.length === 0) return;
    const box = this.box.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const reach = event.pointerType === "touch" ? 30 : 16;
    let [found, least] = [-1, reach * reach];
    for (let place = 0; place < this.xs.length; place++) {
      const distance = (this.xs[place] - x) ** 2 + (this.ys[place] - y) ** 2;
      if (distance < least) [found, least] = [place, distance];
    }
    this.show(found);
  }

  // Show the point at a place of the visible ones, or none.
  show(place) {
    this.current = place;
    this.tip.hidden = place < 0;
    if (!this.xs || place >= this.xs.length) return;
    const context = this.top.getContext("2d");
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.clearRect(0, 0, this.top.width, this.top.height);
    if (place < 0) return;
    const [x, y] = [this.xs[place], this.ys[place]];
    context.lineWidth = 2;
    context.strokeStyle = themed("ink");
    context.beginPath();
    context.arc(x, y, this.radius + 4, 0, 2 * Math.PI);
    context.stroke();
    this.tip.replaceChildren(...this.describe(this.visible[place]).map((words) => make("div", {}, words)));
    const { offsetWidth, offsetHeight } = this.tip;
    const beside = x + 14 + offsetWidth <= this.width ? x + 14 : x - 14 - offsetWidth;
    this.tip.style.left = `${Math.min(Math.max(0, beside), Math.max(0, this.width - offsetWidth))}px`;
    this.tip.style.top = `${y > offsetHeight + 14 ? y - offsetHeight - 10 : y + 14}px`;
  }

  // Columns of points at one place across, each from below upwards.
  inColumns() {
    if (this.columns === null) {
      const across = this.points[this.x];
      const { value } = this.points;
      const order = this.visible.map((index, place) => place);
      const at = (place) => across[this.visible[place]];
      order.sort((a, b) => at(a) - at(b) || value[this.visible[a]] - value[this.visible[b]]);
      this.columns = [];
      let last = NaN;
      for (const place of order) {
        if (at(place) !== last) this.columns.push([]);
        this.columns[this.columns.length - 1].push(place);
        last = at(place);
      }
    }
    return this.columns;
  }

  key(event) {
    const across = { ArrowRight: 1, ArrowLeft: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity }[event.key];
    const up = { ArrowUp: 1, ArrowDown: -1 }[event.key];
    if (event.key === "Escape") this.show(-1);
    if (event.altKey || event.ctrlKey || event.metaKey || (across === undefined && up === undefined)) return;
    event.preventDefault();
    const columns = this.inColumns();
    if (columns.length === 0) return;
    let column = columns.findIndex((places) => places.includes(this.current));
    let place = this.current;
    if (column < 0) place = columns[across < 0 && across > -Infinity ? columns.length - 1 : across === Infinity ? columns.length - 1 : 0][0];
    else if (up !== undefined) {
      const places = columns[column];
      place = places[Math.min(places.length - 1, Math.max(0, places.indexOf(place) + up))];
    } else {
      const height = this.ys[place];
      column = Math.min(columns.length - 1, Math.max(0, column + across));
      place = columns[column].reduce((best, one) => (
        Math.abs(this.ys[one] - height) < Math.abs(this.ys[best] - height) ? one : best));
    }
    this.show(place);
    find("scatter-said").textContent = this.describe(this.visible[place]).join("; ");
  }
}

function line(context, ends) {
  context.beginPath();
  ends.forEach(([x, y], index) => (index ? context.lineTo(x, y) : context.moveTo(x, y)));
  context.stroke();
}
