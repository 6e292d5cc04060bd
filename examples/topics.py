"""Fit latent Dirichlet allocation to documents on disk.

Latent Dirichlet allocation of 8,447 articles of the New York Times. Each article's shares of the
topics are drawn when it comes by and dropped after the step, and its words are read from a file:
memory does not grow with the number of documents.

    python examples/topics.py
    python examples/topics.py --copies 100    # 844,700 documents on disk, in the same memory
    python examples/topics.py --quick         # made-up documents
"""

import argparse
import resource
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.handlers import reparam
from numpyro.infer import MCMC

from numpyro_sgmcmc import SGRLD, HostArray
from numpyro_sgmcmc.metrics import ExpandedMean, expanded_mean

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "papers"))
from topics_data import load, made_up

TOPICS, LONGEST, BATCH_SIZE, SHARE = 20, 128, 100, 0.1


def model(words, size, batch_size=None):
    """The numbers of each document's words, -1 behind the last one."""
    rows = dist.Dirichlet(jnp.full(size, 0.5)).expand([TOPICS]).to_event(1)
    topics = numpyro.sample("topics", rows)
    with numpyro.plate("documents", len(words), subsample_size=batch_size) as i:
        shares = numpyro.sample("shares", dist.Dirichlet(jnp.full(TOPICS, SHARE)))
        w = words[i]
        p = (topics.T[w] * shares[:, None]).sum(-1)
        numpyro.factor("words", jnp.where(w >= 0, jnp.log(p), 0.0).sum(-1))


def draw_shares(rng_key, gibbs_sites, hmc_sites, rows, model_args):
    """The topic of each word given the shares, then the shares given these."""
    topic_key, share_key = random.split(rng_key)
    w = model_args[0][rows]
    size = jnp.abs(hmc_sites["topics_mirrored"])
    p = (size / size.sum(-1, keepdims=True)).T[w] * gibbs_sites["shares"][:, None]
    topic = random.categorical(topic_key, jnp.log(p))
    counts = (jax.nn.one_hot(topic, TOPICS) * (w >= 0)[..., None]).sum(1)
    drawn = jnp.maximum(random.gamma(share_key, SHARE + counts), 1e-30)
    return {"shares": drawn / drawn.sum(-1, keepdims=True)}


def on_disk(words, copies, folder):
    """The documents as a file, one copy after the other."""
    path = Path(folder) / "words"
    with path.open("wb") as file:
        for _ in range(copies):
            file.write(words.tobytes())
    return np.memmap(path, words.dtype, "r", shape=(copies * len(words), LONGEST))


def typical(draws):
    """The words of each topic that are frequent there, and more so than elsewhere; best first."""
    topics = draws.mean(0)
    return np.argsort(-topics * np.log(topics / topics.mean(0)), axis=1)


def plot(draws, words, vocabulary):
    """The words of each topic, with their shares of it and the range of the draws."""
    # Imported here, so that the memory reported is that of the sampler.
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator, PercentFormatter
    from nycflights import style

    plt.switch_backend("Agg")
    with plt.rc_context(style):
        figure, axes = plt.subplots(5, 4, figsize=(8, 8.6), sharex=True, layout="constrained")
        for k, (ax, best) in enumerate(zip(axes.flat, words[:, :6], strict=True)):
            low, high = draws[:, k, best].min(0), draws[:, k, best].max(0)
            places = np.arange(len(best))
            ax.barh(places, draws[:, k, best].mean(0), height=0.7, color="#9fc3dc")
            ax.hlines(places, low, high, color="#2b6a99", linewidth=1.6)
            ax.set_yticks(places, [vocabulary[w] for w in best], fontsize=9)
            ax.tick_params(axis="y", length=0)
            ax.invert_yaxis()
        ax.xaxis.set_major_locator(MaxNLocator(3))
        ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        figure.supxlabel("share of a topic's words", fontsize=9)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--copies", type=int, default=1, help="of the documents on disk")
    parser.add_argument("--draws", type=int, default=60, help="of 20 steps each")
    parser.add_argument("--corpus", choices=("nyt", "reuters"), default="nyt")
    parser.add_argument("--quick", action="store_true", help="few made-up documents")
    parser.add_argument("--output", default="topics.png")
    options = parser.parse_args()
    corpus = made_up(200, 60, LONGEST) if options.quick else load(options.corpus, LONGEST)
    size = len(corpus.vocabulary)

    # A prior count of 1/2 for each word, and steps for the curvature of one copy: the posterior of
    # more copies would be narrower, and ask for shorter ones.
    kernel = SGRLD(
        reparam(model, config={"topics": ExpandedMean()}),
        inverse_metric=expanded_mean("topics"),
        step_size=0.01 / options.copies,
        num_steps=20,
        gradient_estimator="minibatch",
        subsampling="contiguous",
        adapt_mass_matrix=False,
        gibbs_fn=draw_shares,
        gibbs_sites=["shares"],
        keep_locals=False,
        num_gibbs_sweeps=5,
    )
    start = 0.5 * np.random.default_rng(0).gamma(100.0, 0.01, (TOPICS, size))
    with tempfile.TemporaryDirectory() as folder:
        words = on_disk(corpus.words, options.copies, folder)
        mcmc = MCMC(kernel, num_warmup=0, num_samples=options.draws, progress_bar=False)
        mcmc.run(
            random.key(0),
            HostArray(words),
            size,
            BATCH_SIZE,
            init_params={"topics_mirrored": start.astype(np.float32)},
        )
    draws = np.asarray(mcmc.get_samples()["topics"])[options.draws // 2 :]
    best = typical(draws)
    for row in best[:, :8]:
        print("  ".join(corpus.vocabulary[k] for k in row))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{len(words):,} documents, {words.nbytes / 1e6:,.0f} MB on disk")
    print(f"peak memory {peak:,.0f} MB")
    plot(draws, best, corpus.vocabulary).savefig(options.output, dpi=150)


if __name__ == "__main__":
    main()
