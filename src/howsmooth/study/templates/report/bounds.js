// ---- all bounds at one sequence, on one logarithmic scale with the measurement

begin("bounds", ["bounds-explore"], ({ names, labels, sources, places }) => {
  chooseOne("bounds", names, places, places[0], ({ radius, measured, rows }) => {
    const value = measured && measured[0];
    const positive = [value, ...rows.map((one) => one[2])].filter((one) => one > 0);
    const least = Math.min(...positive);
    const width = Math.log(Math.max(...positive) / least) || 1;

    // A mark at a value's place on the scale, in percent of its width.
    function mark(name, at, sign) {
      const node = make("span", { class: name }, sign);
      node.style.left = `${5 + (90 * Math.log(at / least)) / width}%`;
      return node;
    }

    fill("bounds-rows", rows.map(([label, above, bound, power, , source, here]) => {
      const scale = make("div", { class: "scale", "aria-hidden": "true" });
      if (value > 0) scale.append(mark("measured", value, ""));
      if (bound > 0) scale.append(mark("bound", bound, above ? "▼" : "▲"));
      const limit = (one) => shown(one, 4, above ? "ceil" : "floor");
      const words = bound === null ? `10^${limit(power)}` : limit(bound);
      return row(
        ["name", labels[label]],
        ["", here ? "this sequence" : "the ball"],
        ["n", bound === null && power === null ? "none" : `${above ? "≤" : "≥"} ${words}`],
        ["n", bound !== null && value > 0 ? shown(bound / value, 3) : ""],
        ["", scale],
        ["source", sources[source]],
      );
    }));
    find("bounds-said").textContent = `The ball has the radius ${shown(radius)}. ` + (measured === null
      ? "Not measured here."
      : `Measured here: ${shown(value, 6)}, ${interval(measured[1], measured[2])}.`);
  });
});
