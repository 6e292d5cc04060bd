"""Titles of the sections of the documentation's page "Troubleshooting", by entry of a message.

An installed package has no pages. The site's search finds a section by its title.
"""

from __future__ import annotations

__all__ = ["get_section"]

# Labels of the page above each title. The last section, of messages whose fix needs no explanation,
# is left out.
_ENTRIES_BY_SECTION = {
    "Initial values are invalid or have no finite log density": (
        "no-finite-initial-position init-params-not-finite init-strategy init-params "
        "potential-fn-init-params localised"
    ),
    "The training of a network fails or has not converged": "training",
    "Gradient noise biases SDs or means": (
        "gradient-noise-sds gradient-noise-means"  # vocabulary: ok
    ),
    "The discretisation error biases means": "discretisation-means discretisation-step-size",
    "The run is slow": (
        "long-draws slow-subsample-size suggest-subsample-size slow-gradients sorted-data"
    ),
    "A thermostat or noise compensation gives wrong SDs": (
        "thermostat-subsampling noise-compensation noise-compensation-unsupported"
    ),
    "The posterior has several modes": "multimodal",
    "No dominant posterior mode was found": "non-identified",
    "Pilot chains had not converged": "pilot-convergence",
    "The gradient is wrong, or leads out of the support": (
        "inconsistent-gradient gradient-leaves-support"
    ),
    "The log likelihood depends on the minibatch": (
        "non-additive-likelihood position-in-minibatch minibatch-size-in-model"
    ),
    "Data, shapes or the size of a plate are wrong": (
        "data-not-indexed data-shape minibatch-indexing plate-array-length empty-plate "
        "plate-name plate-size-traced subsample-size"
    ),
    "A site uses rows outside of the plate, in pairs or in a sum": (
        "outside-plate pairs-of-rows rows-in-event scalar-in-plate"
    ),
    "An index does not exist, codes begin with 1, or codes are floats": (
        "index-bounds codes-from-one float-index"
    ),
    "A latent site is discrete, or couples rows": (
        "discrete-site delta-site enumeration-plates enumeration-states infer-discrete "
        "dependent-rows enumeration-rows"
    ),
    "Latent sites lack data or a global site": (
        "unobserved-site unobserved-plate only-local-latents"
    ),
    "Draws of a site were not kept, or values of all rows are missing": (
        "collect-sites sites-not-kept keep-draws thinning dropped-deterministic-sites "
        "missing-local-draws full-data-memory"
    ),
    "Local latent variables and gibbs_fn": (
        "gibbs-fn gibbs-options gibbs-sites keep-locals collect-local-sites "
        "local-latents-control-variate local-latents-host-array local-latents-plates "
        "local-latents-random local-latents-subsampling forward-mode-locals "
        "local-latents-gradient bias-of-local-latents gibbs-block-locals"
    ),
    "A potential or loop cannot be traced or differentiated": (
        "potential-fn reverse-mode-loop model-or-potential-fn kernel-without-model"
    ),
    "A model or run cannot use traced arrays, or the data have changed": (
        "traced-value unsupported-argument traced-arguments changed-data numpy-arguments"
    ),
    "A support has no map to unconstrained space": "unsupported-support",
    "A HostArray or ShardedArray is indexed or read wrongly": (
        "row-indexing host-array-index sharded-indexing row-array-source host-array-source "
        "host-array-rows"
    ),
    "Data are masked, missing or infinite": "masked-data nonfinite-data",
    "A type, table, column or level is not supported": (
        "unsupported-dtype integer-range table-columns table-files unknown-levels"
    ),
    "The likelihood is random, or no plate is subsampled": "random-likelihood no-subsampled-plate",
    "A step size, schedule or weights are invalid or predicted to bias draws": (
        "user-step-size no-valid-step-size traced-step-size schedule-function schedule-values "
        "no-finer-run weights-shape weights-values exploration-weights"
    ),
    "The run has no continuous site, or all draws diverged": "no-latent-sites all-diverged",
    "A function of the draws is not supported": (
        "function-bias draws-by-site row-indices function-of-draws rows-of-a-function "
        "not-finite-draws distance-shapes"
    ),
    "A checkpointed run was interrupted, or cannot be stored or resumed": (
        "checkpoint-folder checkpoint-lock checkpoint-sampler checkpoint-unsupported "
        "checkpoint-write interrupted-run damaged-checkpoint damaged-draws resume-differs "
        "resume-key checkpoint-format"
    ),
}
_SECTION_BY_ENTRY = {
    entry: section for section, entries in _ENTRIES_BY_SECTION.items() for entry in entries.split()
}


def get_section(entry: str) -> str | None:
    """Return the title of the section of an entry, or None for an entry without explanation."""
    return _SECTION_BY_ENTRY.get(entry)
