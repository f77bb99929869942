"use strict";
// Hover, zoom and a logarithmic scale for the figures that carry their numbers; without this script they are pictures.
// data-series: curves [{name, colour, width, x, y}], data-marks: steps that are marked;
// data-bars: [[start, stop, row, text]]; data-box on each picture: where its axes lie in it.
const SVG = "http:" + "//www.w3.org/2000/svg";
const make = (name, attributes, parent) => {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return parent ? parent.appendChild(element) : element;
};
const shown = (value) => {
  if (value === null) return "not finite";
  const size = Math.abs(value), plain = size < 1e5 && (size >= 1e-3 || !size);
  return plain ? String(Number(value.toPrecision(5))) : value.toExponential(2);
};

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle;
    else high = middle;
  }
  return Math.abs(xs[high] - x) < Math.abs(xs[low] - x) ? high : low;
}

function ticks(low, high, log, about = 4) {
  if (log) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
      for (const digit of [1, 2, 5]) {
        const at = digit * 10 ** power;
        if (at >= low && at <= high) found.push(at);
      }
    const isPower = (at) => Number.isInteger(Math.round(Math.log10(at) * 1e6) / 1e6);
    if (found.length > 1) return found.length > 9 ? found.filter(isPower) : found;
  }
  const rough = (high - low) / about || 1, unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((digit) => digit * unit).find((each) => each >= rough);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(at);
  return found;
}

class Picture {
  constructor(figure, place) {
    this.figure = figure;
    this.place = place;
    this.series = JSON.parse(figure.dataset.series || "[]");
    this.bars = JSON.parse(figure.dataset.bars || "[]");
    this.box = JSON.parse(place.dataset.box);
    this.still = place.querySelector("svg");
    this.view = this.still.viewBox.baseVal;
    this.home();
    this.note = place.appendChild(document.createElement("output"));
    this.note.hidden = true;
    place.addEventListener("pointermove", (event) => this.point(event));
    place.addEventListener("pointerleave", () => { this.note.hidden = true; this.mark.remove(); });
    const look = { fill: "var(--muted)", opacity: 0.35, "pointer-events": "none" };
    this.mark = make("rect", { y: this.box.top, height: this.box.bottom - this.box.top, ...look });
    if (!this.series.length) return;
    place.addEventListener("pointerdown", (event) => { this.from = this.across(event); event.preventDefault(); });
    window.addEventListener("pointerup", (event) => this.let_go(event));
    place.addEventListener("dblclick", () => this.zoom(null));
  }
  home() { this.x = this.box.x; this.y = this.box.y; this.zoomed = this.log = false; }
  get current() { return this.drawn || this.still; }
  inside(event) {
    const seen = this.current.getBoundingClientRect(), { width, height } = this.view;
    return [(event.clientX - seen.left) / seen.width * width, (event.clientY - seen.top) / seen.height * height];
  }
  across(event) {
    const share = (this.inside(event)[0] - this.box.left) / (this.box.right - this.box.left);
    return this.x[0] + Math.min(1, Math.max(0, share)) * (this.x[1] - this.x[0]);
  }
  at(x) { return this.box.left + (x - this.x[0]) / (this.x[1] - this.x[0]) * (this.box.right - this.box.left); }
  up(y) {
    const scale = this.log ? Math.log10 : (value) => value, [low, high] = this.y.map(scale);
    return this.box.bottom - (scale(y) - low) / (high - low) * (this.box.bottom - this.box.top);
  }
  point(event) {
    const x = this.across(event), text = this.series.length ? this.values(x) : this.bar(event, x);
    this.note.hidden = !text;
    this.mark.remove();
    if (!text) return;
    this.note.textContent = text;
    const right = event.clientX > this.place.getBoundingClientRect().left + this.place.clientWidth / 2;
    const seen = this.place.getBoundingClientRect();
    this.note.style.left = right ? "" : `${event.clientX - seen.left + 14}px`;
    this.note.style.right = right ? `${seen.right - event.clientX + 14}px` : "";
    this.note.style.top = `${event.clientY - seen.top + 12}px`;
    if (!this.series.length) return;
    const start = this.from === undefined ? this.at(x) : Math.min(this.at(this.from), this.at(x));
    this.mark.setAttribute("x", start);
    this.mark.setAttribute("width", this.from === undefined ? 1 : Math.abs(this.at(this.from) - this.at(x)));
    this.current.appendChild(this.mark);
  }
  values(x) {
    const near = this.series.filter((each) => each.x.length).map((each) => [each, nearest(each.x, x)]);
    if (!near.length) return "";
    const step = near.map(([each, i]) => each.x[i]).reduce((a, b) => (Math.abs(a - x) <= Math.abs(b - x) ? a : b));
    const where = (each, i) => (each.x[i] === step ? "" : ` (step ${each.x[i]})`);
    return [`step ${step}`, ...near.map(([each, i]) => `${each.name} ${shown(each.y[i])}${where(each, i)}`)].join("\n");
  }
  bar(event, x) {
    const down = (this.inside(event)[1] - this.box.top) / (this.box.bottom - this.box.top);
    const row = this.y[1] + down * (this.y[0] - this.y[1]);
    const slack = 3 / (this.box.right - this.box.left) * (this.x[1] - this.x[0]);
    const hit = this.bars.filter(
      (each) => Math.abs(each[2] - row) < 0.5 && x >= each[0] - slack && x <= each[1] + slack,
    );
    hit.sort((a, b) => a[1] - a[0] - (b[1] - b[0]));
    return hit.slice(0, 4).map((each) => each[3]).join("\n");
  }
  let_go(event) {
    if (this.from === undefined) return;
    const [low, high] = [this.from, this.across(event)].sort((a, b) => a - b);
    this.from = undefined;
    this.mark.remove();
    if (this.at(high) - this.at(low) > 6) this.zoom([low, high]);
  }
  zoom(x) {
    this.figure.dispatchEvent(new CustomEvent("zoom", { detail: x !== null }));
    this.zoomed = x !== null;
    this.x = x || this.box.x;
    this.draw();
  }
  scale(log) { this.log = log; this.draw(); }
  draw() {
    if (this.drawn) this.drawn.remove();
    this.drawn = null;
    this.still.style.display = "";
    if (!this.zoomed && !this.log) return this.home();
    const within = (x) => x >= this.x[0] && x <= this.x[1];
    const inside = (each, i) => within(each.x[i]) && each.y[i] !== null && (!this.log || each.y[i] > 0);
    const seen = this.series.flatMap((each) => each.y.filter((_, i) => inside(each, i)));
    const low = seen.reduce((a, b) => Math.min(a, b), Infinity);
    const high = seen.reduce((a, b) => Math.max(a, b), -Infinity);
    if (!seen.length) this.y = this.log ? [1, 10] : [0, 1];
    else if (this.log) this.y = [low / 1.05, high * 1.05];
    else {
      const room = 0.06 * (high - low) || Math.abs(high) / 10 || 1;
      this.y = [low - room, high + room];
    }
    const svg = this.drawn = make("svg", { viewBox: this.still.getAttribute("viewBox"), class: "drawn" });
    for (const y of ticks(this.y[0], this.y[1], this.log)) {
      const height = this.up(y);
      make("line", { x1: this.box.left, x2: this.box.right, y1: height, y2: height, stroke: "var(--rule)" }, svg);
      make("text", { x: this.box.left - 7, y: height + 4, "text-anchor": "end" }, svg).textContent = shown(y);
    }
    ticks(this.x[0], this.x[1], false, this.view.width / 110).forEach((x, i) => {
      const label = make("text", { x: this.at(x), y: this.box.bottom + 18, "text-anchor": "middle" }, svg);
      label.textContent = (i ? "" : "step ") + shown(x);
    });
    for (const x of JSON.parse(this.figure.dataset.marks).filter(within)) {
      const line = { x1: this.at(x), x2: this.at(x), y1: this.box.top, y2: this.box.bottom };
      make("line", { ...line, stroke: "var(--muted)", "stroke-dasharray": "4 3" }, svg);
    }
    for (const each of this.series) {
      let path = "", pen = "M";
      const points = [];
      for (let i = 0; i < each.x.length; i++) {
        if (!inside(each, i)) { pen = "M"; continue; }
        points.push(i);
        path += `${pen}${this.at(each.x[i]).toFixed(1)} ${this.up(each.y[i]).toFixed(1)}`;
        pen = "L";
      }
      make("path", { d: path, fill: "none", stroke: each.colour, "stroke-width": each.width }, svg);
      for (const i of points.length < 60 ? points : [])
        make("circle", { cx: this.at(each.x[i]), cy: this.up(each.y[i]), r: 2.5, fill: each.colour }, svg);
    }
    this.still.style.display = "none";
    this.still.after(svg);
  }
}

for (const figure of document.querySelectorAll("figure[data-series], figure[data-bars]")) {
  const pictures = [...figure.querySelectorAll("[data-box]")].map((place) => new Picture(figure, place));
  if (!figure.dataset.series) continue;
  const button = (text, act) => {
    const made = figure.querySelector("figcaption").appendChild(document.createElement("button"));
    made.textContent = text;
    made.addEventListener("click", () => act(made));
    return made;
  };
  button("log", (made) => {
    const log = made.getAttribute("aria-pressed") !== "true";
    made.setAttribute("aria-pressed", String(log));
    for (const picture of pictures) picture.scale(log);
  });
  const whole = button("whole", () => pictures.forEach((picture) => picture.zoom(null)));
  whole.hidden = true;
  figure.addEventListener("zoom", (event) => { whole.hidden = !event.detail; });
}
