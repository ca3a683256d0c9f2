// ---- what needs a script is shown once it runs

function begin(id, section, kind) {
  const data = read(id);
  if (data === null) return;
  find(section).hidden = false;
  new kind(data);
}

begin("scatter-data", "explore", Scatter);
begin("bounds-data", "bounds-explore", Bounds);
begin("tokens-data", "tokens-fields", Tokens);
