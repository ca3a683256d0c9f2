// ---- what needs a script is shown once it runs

function begin(id, sections, kind) {
  const data = read(id);
  if (data === null) return;
  for (const section of sections) find(section).hidden = false;
  new kind(data);
}

begin("scatter-data", ["explore", "to-explore"], Scatter);
begin("bounds-data", ["bounds-explore"], Bounds);
begin("tokens-data", ["tokens-fields"], Tokens);
