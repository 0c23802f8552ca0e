"""What private training (DP-SGD) promises, by the accountant of Google's ``dp-accounting``."""

from __future__ import annotations

import math

from odtpack.errors import OdtpackError


def epsilon(noise_multiplier: float, sampling_rate: float, steps: int, delta: float) -> float:
    """Return the epsilon that steps with private gradients keep, for one sample more or less.

    By Rényi differential privacy of the Gaussian mechanism under Poisson sampling (Mironov,
    Talwar and Zhang, 2019): each sample is in each batch with the same probability, independently.

    Args:
        noise_multiplier: Standard deviation of the noise as a multiple of the clipping norm.
        sampling_rate: That probability, above 0 and at most 1.
        steps: Steps in all.
        delta: Probability that the guarantee fails, between 0 and 1.

    Returns:
        An upper bound; infinity without noise.

    Raises:
        OdtpackError: A number is out of range (``bad-argument``), or ``dp-accounting`` is not
            installed (``privacy-not-installed``).
    """
    for name, value, good in (
        ("noise_multiplier", noise_multiplier, 0 <= noise_multiplier < math.inf),
        ("sampling_rate", sampling_rate, 0 < sampling_rate <= 1),
        ("steps", steps, steps >= 0),
        ("delta", delta, 0 < delta < 1),
    ):
        if not good:
            raise OdtpackError("bad-argument", f"{name} is {value:g}, which is out of range")
    try:
        import dp_accounting
        from dp_accounting.rdp import RdpAccountant
    except ImportError as error:
        raise OdtpackError(
            "privacy-not-installed",
            "the epsilon of private training is computed by dp-accounting, which is not installed",
        ) from error
    if steps == 0:
        return 0.0
    if noise_multiplier == 0:
        return math.inf
    gaussian = dp_accounting.GaussianDpEvent(noise_multiplier)
    event = dp_accounting.PoissonSampledDpEvent(sampling_rate, gaussian)
    return float(RdpAccountant().compose(event, steps).get_epsilon(delta))
