// ---- the sensitive tokens of a sequence, on the text itself

const LEVELS = 9;

class Tokens {
  constructor(data) {
    this.data = data;
    this.chooser = new Chooser(
      find("tokens-fields"),
      fieldsOf(data.names, "n", "sample"),
      data.rows,
      { start: data.rows[data.start], all: false, changed: () => this.show() },
    );
    this.show();
  }

  show() {
    const row = this.data.rows.find((one) => this.chooser.fits(one));
    const { words: tokens, apart } = this.data.sequences[row.sequence];
    for (const side of ["input", "output"]) {
      const most = Math.max(...row[side]);
      const spans = tokens.map((token, index) => {
        const level = most > 0 ? Math.round((LEVELS * row[side][index]) / most) : 0;
        const title = `token ${index + 1}: ${percent(row[side][index])} of the ${side} energy`;
        return make("span", { class: `e${level}`, title }, token);
      });
      find(`tokens-${side}`).replaceChildren(...spans);
      find(`tokens-${side}`).classList.toggle("apart", apart);
    }
    const order = tokens.map((token, index) => index).sort((a, b) => row.input[b] - row.input[a]);
    const lines = order.map((index) => make(
      "tr", {},
      make("td", { class: "n" }, String(index + 1)),
      make("td", { class: "token" }, tokens[index]),
      make("td", { class: "n" }, percent(row.input[index])),
      make("td", { class: "n" }, percent(row.output[index])),
    ));
    find("tokens-rows").replaceChildren(...lines);
    const half = share(row.input, 0.5);
    find("tokens-said").textContent = `${this.data.names.model[row.model]}, layer ${row.layer}`
      + `${row.head === null ? "" : `, head ${row.head}`}, scope ${this.data.names.scope[row.scope]}, n = ${row.n}: `
      + `half of the input energy is on ${half} of the ${tokens.length} tokens, `
      + `half of the output energy on ${share(row.output, 0.5)}.`
      + (row.converged ? "" : " This measurement did not converge, so that its direction is not settled.");
  }
}

// How many of the largest it takes to have a part of the whole.
function share(energies, part) {
  const sorted = [...energies].sort((a, b) => b - a);
  const whole = sorted.reduce((sum, energy) => sum + energy, 0);
  let [sum, count] = [0, 0];
  while (count < sorted.length && sum < part * whole) sum += sorted[count++];
  return count;
}
