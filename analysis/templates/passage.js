"use strict";

/** The weights of a passage: what every reader takes from every source, token by token, and on average over the text. */
class Passage {
  /** `given` is what `_weights` of page.py makes of an inspection. */
  constructor(given) {
    Object.assign(this, { attention: given.attention, readers: given.readers, sources: given.sources });
    this.tokens = given.tokens;
    this.means = given.weights.map((reader) => reader.mean);
    const bytes = Uint8Array.from(atob(given.data), (character) => character.charCodeAt(0));
    const levels = new DataView(bytes.buffer);
    let begin = 0;
    this.rows = given.weights.map(({ mean, constant, low, high }) => {
      const row = new Float64Array(mean.length * this.tokens);
      for (let i = 0; i < row.length; i++) {
        row[i] = constant
          ? constant[Math.floor(i / this.tokens)]
          : low + ((high - low) * levels.getUint16(begin + 2 * i, true)) / 65535;
      }
      begin += constant ? 0 : 2 * row.length;
      return row;
    });
  }

  weight(reader, source, token) {
    return this.rows[reader][source * this.tokens + token];
  }

  /** How far each token's weights are from the mean ones: half the absolute differences, a mean over readers. */
  distances() {
    const several = this.means.map((_, reader) => reader).filter((reader) => this.means[reader].length > 1);
    return Array.from({ length: this.tokens }, (_, token) => {
      let sum = 0;
      for (const reader of several) {
        this.means[reader].forEach((mean, source) => (sum += Math.abs(this.weight(reader, source, token) - mean)));
      }
      return sum / 2 / Math.max(several.length, 1);
    });
  }

  /**
   * The ends of a colour scale on which all tokens can be compared, and the least and largest value. A few values may
   * lie beyond the ends. Readers of one source, which is all they read, have no say in them.
   */
  range(difference) {
    const values = this.rows.map((row, reader) =>
      row.map((weight, i) => (difference ? weight - this.means[reader][Math.floor(i / this.tokens)] : weight)),
    );
    const ends = (rows) => {
      const sorted = new Float64Array(rows.reduce((sum, row) => sum + row.length, 0));
      rows.reduce((begin, row) => (sorted.set(row, begin), begin + row.length), 0);
      return sorted.sort();
    };
    const all = ends(values);
    const sorted = ends(values.filter((_, reader) => this.means[reader].length > 1));
    const at = (share) => sorted[Math.floor(share * (sorted.length - 1))] ?? 0;
    const [low, high] = [at(0.002), at(0.998)];
    const beyond = { least: all[0], most: all[all.length - 1] };
    // Zero is at the end of one hue, or in the middle of two.
    if (!difference && low >= 0) return { low: 0, high: high > 1e-9 ? high : 1, flat: high <= 1e-9, ...beyond };
    const limit = Math.max(Math.abs(low), Math.abs(high));
    const flat = limit <= 1e-5;
    return { low: flat ? -1 : -limit, high: flat ? 1 : limit, flat, ...beyond };
  }
}

/** The widest scale of several; one on which nothing can be seen does not count beside others. */
function union(given) {
  const seen = given.filter((range) => !range.flat);
  const ranges = seen.length ? seen : given;
  const widest = (pick, name) => pick(...ranges.map((range) => range[name]));
  const [low, least] = ["low", "least"].map((name) => widest(Math.min, name));
  const [high, most] = ["high", "most"].map((name) => widest(Math.max, name));
  // Zero stays in the middle of two hues.
  return low < 0 ? { low: -Math.max(-low, high), high: Math.max(-low, high), least, most } : { low, high, least, most };
}

/** Two digits that count, as a rule; a difference has its sign. */
function shownNumber(value, signed = false) {
  const text = Math.abs(value) < 0.00005 ? "0" : Math.abs(value) < 10 ? value.toFixed(Math.abs(value) < 0.01 ? 4 : 3) : value.toPrecision(4);
  return (signed && value > 0 && text !== "0" ? "+" : "") + text.replace("-", "−");
}
