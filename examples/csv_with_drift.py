"""Learn the weights of past days for a model of a CSV file whose rows drift: python csv_with_drift.py."""

import json
import math
import random
from pathlib import Path

import obbo_lightning.cli as obbo

# A sensor whose bias changes slowly at first, then ten times as fast: one row per hour, in the order of time.
random.seed(0)
angle, lines = 0.0, ["temperature,load,failed"]
for hour in range(24 * 120):
    angle += 0.001 if hour < 24 * 60 else 0.01
    temperature, load = random.gauss(0, 1), random.gauss(0, 1)
    danger = 2 * (math.cos(angle) * temperature + math.sin(angle) * load)
    failed = int(random.random() < 1 / (1 + math.exp(-danger)))
    lines.append(f"{temperature:.3f},{load:.3f},{failed}")
Path("sensor.csv").write_text("\n".join(lines) + "\n")

# Every day is predicted by a logistic model of the 20 days before it, whose weights are learned online.
data = ["--data.csv", "sensor.csv", "--data.target", "failed", "--data.block", "24", "--data.past", "20"]
assert obbo.main(["fit", "--config", "forgetting", *data, "--rounds", "100", "--output", "runs"]) == 0

(run,) = Path("runs/forgetting").iterdir()
summary = json.loads((run / "summary.json").read_text())
baselines = summary["baselines"]
print(f"learned {summary['prequential_loss']:.3f};", {name: round(loss, 3) for name, loss in baselines.items()})
assert summary["prequential_loss"] < baselines["equal weights"]
