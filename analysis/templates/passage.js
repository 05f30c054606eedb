"use strict";

/**
 * The weights of a passage: how much every reader (a sublayer, or the output) takes from every source, token by token,
 * and on average over the text.
 */
class Passage {
  /** Decode `given`, the result of `_passage_data` in page.py. */
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

  /** Return the weight that a reader gives a source at a token, all by index. */
  weight(reader, source, token) {
    return this.rows[reader][source * this.tokens + token];
  }

  /** Return the distance of each token's weights from the mean weights, on average over readers of several sources. */
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
   * Return a colour scale for all tokens: its ends `low` and `high`; `flat`, whether all values are zero up to
   * rounding; and the smallest and largest value, `least` and `most`. A few values may lie beyond the ends. Readers of
   * a single source do not count for the ends. `difference`: whether values are differences from the mean weights.
   */
  range(difference) {
    const values = this.rows.map((row, reader) =>
      row.map((weight, i) => (difference ? weight - this.means[reader][Math.floor(i / this.tokens)] : weight)),
    );
    const sort = (rows) => {
      const sorted = new Float64Array(rows.reduce((sum, row) => sum + row.length, 0));
      rows.reduce((begin, row) => (sorted.set(row, begin), begin + row.length), 0);
      return sorted.sort();
    };
    const all = sort(values);
    const sorted = sort(values.filter((_, reader) => this.means[reader].length > 1));
    const at = (share) => sorted[Math.floor(share * (sorted.length - 1))] ?? 0;
    const [low, high] = [at(0.002), at(0.998)];
    const beyond = { least: all[0], most: all[all.length - 1] };
    // With one hue, zero is its end. With two hues, zero is in the middle.
    if (!difference && low >= 0) return { low: 0, high: high > 1e-9 ? high : 1, flat: high <= 1e-9, ...beyond };
    const limit = Math.max(Math.abs(low), Math.abs(high));
    const flat = limit <= 1e-5;
    return { low: flat ? -1 : -limit, high: flat ? 1 : limit, flat, ...beyond };
  }
}

/** Return a scale that spans several scales. Flat ones count only if all are flat. */
function union(scales) {
  const visible = scales.filter((scale) => !scale.flat);
  const ranges = visible.length ? visible : scales;
  const widest = (pick, name) => pick(...ranges.map((range) => range[name]));
  const [low, least] = ["low", "least"].map((name) => widest(Math.min, name));
  const [high, most] = ["high", "most"].map((name) => widest(Math.max, name));
  // With two hues, zero stays in the middle.
  return low < 0 ? { low: -Math.max(-low, high), high: Math.max(-low, high), least, most } : { low, high, least, most };
}

/** Return a number as text with three or four decimals; `signed` puts a plus before positive numbers. */
function shownNumber(value, signed = false) {
  const text = Math.abs(value) < 0.00005 ? "0" : Math.abs(value) < 10 ? value.toFixed(Math.abs(value) < 0.01 ? 4 : 3) : value.toPrecision(4);
  return (signed && value > 0 && text !== "0" ? "+" : "") + text.replace("-", "−");
}
