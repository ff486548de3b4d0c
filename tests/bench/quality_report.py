"""Turns the figures of ./run bench quality --json F into docs/quality: a table in Markdown and a plot per problem."""

import argparse
import html
import json
import math
import pathlib

WIDTH, HEIGHT = 980, 420
COLOURS = ["#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22",
           "#393b79", "#637939", "#843c39", "#7b4173", "#3182bd", "#31a354"]


def number(value):
    return "diverged" if value is None else f"{value:.3g}"


def text(x, y, content, size=11, anchor="start", colour="#222"):
    return (f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">'
            f"{html.escape(content)}</text>")


class LogAxis:
    """Maps positive values onto [begin, end] of the drawing."""

    def __init__(self, values, begin, end):
        self.low, self.high = math.log10(min(values)), math.log10(max(values))
        margin = 0.04 * (self.high - self.low) or 0.1
        self.low, self.high, self.begin, self.end = self.low - margin, self.high + margin, begin, end

    def __call__(self, value):
        return self.begin + (math.log10(value) - self.low) / (self.high - self.low) * (self.end - self.begin)

    def ticks(self):
        span = self.high - self.low
        steps = [1] if span > 1.5 else [1, 2, 5] if span > 0.4 else [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8]
        return [m * 10 ** e for e in range(math.floor(self.low), math.ceil(self.high) + 1) for m in steps
                if self.low <= math.log10(m * 10 ** e) <= self.high]


def sensitivity(scores, y, left, right, bottom):
    """Mean metric over the learning rates, each relative to the rule's best."""
    x = LogAxis([1e-2, 1e2], left, right)
    parts = [text(left, 40, "tuning: metric over learning rate / best learning rate", 12)]
    parts += [text(x(t), bottom + 16, f"{t:g}", 10, "middle") for t in (0.01, 0.1, 1, 10, 100)]
    for colour, score in zip(COLOURS, scores):
        points = [(g["lr"] / score["best_lr"], g["value"]) for g in score["grid"] if g["value"] is not None]
        path = " ".join(f"{x(lr):.1f},{y(value):.1f}" for lr, value in points
                        if 0.01 <= lr <= 100 and math.log10(value) <= y.high)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    return parts


def finals(scores, y, left, right):
    """Median and whole range over the final seeds."""
    parts = [text(left, 40, "best learning rate, fresh seeds: median and range", 12)]
    step = (right - left) / len(scores)
    for i, (colour, score) in enumerate(zip(COLOURS, scores)):
        x = left + (i + 0.5) * step
        if score["median"] is not None:
            high = score["max"] if score["max"] is not None else 10 ** y.high
            high = min(high, 10 ** y.high)
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y(score["min"]):.1f}" y2="{y(high):.1f}" '
                         f'stroke="{colour}" stroke-width="2"/>')
            parts.append(f'<circle cx="{x:.1f}" cy="{y(min(score["median"], 10 ** y.high)):.1f}" r="4" fill="{colour}"/>')
        parts.append(f'<text transform="translate({x + 3:.1f},{HEIGHT - 62}) rotate(-60)" font-size="10" '
                     f'text-anchor="end" fill="{colour}">{html.escape(score["rule"])}</text>')
    return parts


def plot(title, metric, scores):
    values = [v for s in scores for v in [s["median"], s["min"]] + [g["value"] for g in s["grid"]] if v]
    best = min(values)
    ceiling = max([s["max"] or best for s in scores if s["median"]] + [best * 1.5])
    bottom = HEIGHT - 80
    y = LogAxis([best, min(max(values), ceiling * 2)], bottom, 50)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
             f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', text(60, 20, f"{title}: {metric}", 14)]
    for tick in y.ticks():
        parts.append(f'<line x1="60" x2="{WIDTH - 20}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#ddd"/>')
        parts.append(text(54, y(tick) + 4, f"{tick:g}", 10, "end"))
    parts += sensitivity(scores, y, 60, 460, bottom) + finals(scores, y, 490, WIDTH - 20)
    return "\n".join(parts + ["</svg>", ""])


def table(scores):
    rows = ["| rule | median | min | max | learning rate |", "|---|---|---|---|---|"]
    for s in sorted(scores, key=lambda s: s["median"] if s["median"] is not None else math.inf):
        edge = " (edge of the grid)" if s["at_edge"] else ""
        rows.append(f'| {s["rule"]} | {number(s["median"])} | {number(s["min"])} | {number(s["max"])} | '
                    f'{s["best_lr"]:.3g}{edge} |')
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("figures", type=pathlib.Path)
    parser.add_argument("folder", type=pathlib.Path, help="gets figures.md and the plots")
    arguments = parser.parse_args()
    study = json.loads(arguments.figures.read_text())
    arguments.folder.mkdir(parents=True, exist_ok=True)
    lines = ["<!-- Written by tests/bench/quality_report.py. -->", "# Figures of the quality study", "",
             f'Each rule: {study["grid_points"]} learning rates half a decade apart, {study["tuning_seeds"]} tuning seeds each; '
             f'then {study["final_seeds"]} fresh seeds at the best one. Learning rates fall linearly to zero. Smaller is better.']
    for problem in study["problems"]:
        for key, title in (("rules", problem["problem"]), ("row_wise", problem["problem"] + ", row-wise step")):
            image = f'{problem["problem"]}_{key}.svg'
            (arguments.folder / image).write_text(plot(title, problem["metric"], problem[key]))
            lines += ["", f"## {title}", "", f'{problem["what"]}; {problem["steps"]} steps. {problem["metric"]}.', ""]
            lines += table(problem[key]) + ["", f"![{title}]({image})"]
    (arguments.folder / "figures.md").write_text("\n".join(lines) + "\n")
    print(f"wrote {arguments.folder}/figures.md and {2 * len(study['problems'])} plots")


if __name__ == "__main__":
    main()
