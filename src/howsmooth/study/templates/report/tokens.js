// ---- the sensitive tokens of a sequence, on the text itself

const LEVELS = 9;

begin("tokens", ["tokens-fields"], ({ names, sequences, rows, start }) => {
  chooseOne("tokens", names, rows, rows[start], (one) => {
    const { words: tokens, apart } = sequences[one.sequence];
    for (const side of ["input", "output"]) {
      const most = Math.max(...one[side]);
      find(`tokens-${side}`).classList.toggle("apart", apart);
      find(`tokens-${side}`).replaceChildren(...tokens.map((token, index) => make("span", {
        class: `e${most > 0 ? Math.round((LEVELS * one[side][index]) / most) : 0}`,
        title: `token ${index + 1}: ${percent(one[side][index])} of the ${side} energy`,
      }, token)));
    }
    const order = [...tokens.keys()].sort((a, b) => one.input[b] - one.input[a]);
    fill("tokens-rows", order.map((index) => row(
      ["n", index + 1], ["token", tokens[index]], ["n", percent(one.input[index])], ["n", percent(one.output[index])],
    )));
    find("tokens-said").textContent = `${names.model[one.model]}, layer ${one.layer}`
      + `${one.head === null ? "" : `, head ${one.head}`}, scope ${names.scope[one.scope]}, n = ${one.n}: `
      + `half of the input energy is on ${one.half[0]} of the ${tokens.length} tokens, `
      + `half of the output energy on ${one.half[1]}.`
      + (one.converged ? "" : " This measurement did not converge, so that its direction is not settled.");
  });
});

function percent(share) {
  const value = 100 * share;
  return `${value >= 10 ? value.toFixed(0) : value >= 0.095 ? value.toFixed(1) : value.toPrecision(1)} %`;
}
