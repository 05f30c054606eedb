"use strict";

/** The words of a text as buttons, of which one is chosen. `choose(index, word)` is called for every choice. */
class Strip {
  constructor(element, choose) {
    this.element = element;
    this.buttons = [...element.querySelectorAll("button")];
    this.chosen = 0;
    this.choose = (at, focus = false) => {
      this.buttons.forEach((button, i) => {
        button.setAttribute("aria-pressed", i === at);
        button.tabIndex = i === at ? 0 : -1;
      });
      this.chosen = at;
      if (focus) this.buttons[at].focus();
      choose(at, this.buttons[at].textContent);
    };
    const words = element.querySelector(".words");
    words.addEventListener("click", ({ target }) => {
      const at = this.buttons.indexOf(target.closest("button"));
      if (at >= 0) this.choose(at, true);
    });
    words.addEventListener("keydown", (event) => {
      const last = this.buttons.length - 1;
      const moves = {
        ArrowLeft: () => Math.max(this.chosen - 1, 0),
        ArrowRight: () => Math.min(this.chosen + 1, last),
        ArrowUp: () => this.neighbour(-1),
        ArrowDown: () => this.neighbour(1),
        Home: () => 0,
        End: () => last,
      };
      if (event.altKey || event.ctrlKey || event.metaKey || !(event.key in moves)) return;
      event.preventDefault();
      this.choose(moves[event.key](), true);
    });
  }

  /** Return the index of the word above (-1) or below (1) the chosen one. */
  neighbour(direction) {
    const boxes = this.buttons.map((button) => button.getBoundingClientRect());
    const from = boxes[this.chosen];
    const distances = boxes.map((box, i) => [i, direction * (box.top - from.top), Math.abs(box.left - from.left)]);
    const others = distances.filter(([, down]) => down > from.height / 2);
    const next = Math.min(...others.map(([, down]) => down));
    const line = others.filter(([, down]) => down < next + from.height / 2);
    return line.reduce((best, other) => (other[2] < best[2] ? other : best), line[0] ?? [this.chosen])[0];
  }

  /** Tint each word by the distance of its weights from the mean weights. */
  tint(distances) {
    const [least, most] = [Math.min(...distances), Math.max(...distances)];
    const varies = most > 1e-5; // smaller distances are rounding errors
    this.buttons.forEach((button, i) =>
      button.style.setProperty("--far", varies ? (distances[i] - least) / (most - least || 1) : 0),
    );
    const legend = this.element.querySelector(".tint-legend");
    legend.querySelector(".least").textContent = varies ? shownNumber(least) : "0: they are the same for every token";
    legend.querySelector(".most").textContent = varies ? shownNumber(most) : "";
    legend.querySelector(".ramp").hidden = !varies;
  }
}

/** Build the maps and strips from the data of the page, and connect them. */
async function begin() {
  const view = document.getElementById("reader");
  const passages = JSON.parse(document.getElementById("given").textContent).map((given) => new Passage(given));
  const distances = passages.map((passage) => passage.distances());
  view.hidden = false;
  const maps = [...view.querySelectorAll(".map")].map((element, i) => new HeatMap(element, passages[i]));

  // Two maps share a scale if both show depth weights, or both show matrices.
  const alike = passages.every(({ attention }) => attention === passages[0].attention);
  const scales = [false, true].map((difference) => {
    const ranges = passages.map((passage) => passage.range(difference));
    return alike ? ranges.map(() => union(ranges)) : ranges;
  });
  const rescale = (difference) =>
    maps.forEach((map, i) => {
      map.difference = difference;
      map.scale(scales[Number(difference)][i]);
    });
  rescale(view.querySelector("[name=shown]:checked").value === "difference");
  await Promise.all(maps.map((map) => map.draw()));

  const elements = [...view.querySelectorAll(".strip")];
  const shared = elements.length < maps.length;
  const strips = elements.map(
    (element, i) => new Strip(element, (at, word) => (shared ? maps : [maps[i]]).forEach((map) => map.show(at, word))),
  );
  strips.forEach((strip, i) => strip.tint(distances[i]));
  for (const input of view.querySelectorAll("[name=tint]")) {
    input.addEventListener("change", () => strips[0].tint(distances[Number(input.value)]));
  }
  // At first, words are tinted by the model whose weights vary more.
  const largest = distances.map((values) => Math.max(...values));
  view.querySelectorAll("[name=tint]")[largest[1] > largest[0] ? 1 : 0]?.click();
  strips.forEach((strip) => strip.choose(0));

  for (const input of view.querySelectorAll("[name=shown]")) {
    input.addEventListener("change", () => {
      rescale(input.value === "difference");
      strips.forEach((strip) => strip.choose(strip.chosen));
    });
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => maps.forEach((map) => map.paint()));
  view.dataset.ready = "true";
}

begin();
