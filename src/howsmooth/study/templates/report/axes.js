// ---- logarithmic axes

// Round numbers between two positive ones, at most so many.
function ticksBetween(low, high, most) {
  const decades = Math.log10(high / low);
  const digits = [
    [1, 1.5, 2, 2.5, 3, 4, 5, 6, 8],
    [1, 2, 3, 4, 6, 8],
    [1, 2, 5],
    [1, 3],
    [1],
  ];
  if (decades >= 0.5) {
    for (const choice of digits) {
      const found = [];
      for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
        for (const digit of choice) found.push(Number(`${digit}e${power}`));
      }
      const inside = found.filter((tick) => tick >= low && tick <= high);
      if (inside.length <= most && inside.length >= 2) return inside;
    }
    if (decades >= 2) {
      const stride = Math.ceil(decades / most);
      const first = Math.ceil(Math.log10(low));
      const powers = [];
      for (let power = first; power <= Math.log10(high); power += stride) powers.push(Number(`1e${power}`));
      return powers;
    }
  }
  const rough = (high - low) / most;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((digit) => digit * unit).find((size) => size >= rough);
  const found = [];
  for (let count = Math.ceil(low / step); count * step <= high; count++) {
    found.push(Number((count * step).toPrecision(12)));
  }
  return found;
}

class LogAxis {
  // From the values low and high to the places from and to, in pixels.
  constructor(low, high, from, to) {
    if (!(high > low * 1.05)) [low, high] = [low / 1.03, high * 1.03];
    const margin = (high / low) ** 0.05;
    this.low = low / margin;
    this.high = high * margin;
    this.from = from;
    this.scale = (to - from) / Math.log(this.high / this.low);
  }

  at(value) {
    return this.from + Math.log(value / this.low) * this.scale;
  }

  ticks(most) {
    return ticksBetween(this.low, this.high, most);
  }
}
