"""Every variant once more, in its dumbest form: plain Python floats, one token after the other, from the papers.

Nothing here knows torch or the package. Gradients are those that the papers give, or that follow from them on paper;
the departures that the package documents (log-ratios are cut to +-20) are repeated here.

A completion is a dict: ``logp`` and ``old`` (floats per token; ``old`` may be None), ``mask`` (bools), ``A``.
"""

from __future__ import annotations

import math

CUT = 20.0


def ratio(x: float) -> tuple[float, float]:
    """exp(x), and its derivative; x is cut to +-20."""
    value = math.exp(max(-CUT, min(CUT, x)))
    return value, value if abs(x) <= CUT else 0.0


def credited(row: dict) -> list[int]:
    return [t for t, m in enumerate(row["mask"]) if m]


def log_ratio(row: dict, t: int) -> float:
    return 0.0 if row["old"] is None else row["logp"][t] - row["old"][t]


def ratios(row: dict, level: str) -> dict[int, tuple[float, dict[int, float]]]:
    """For each credited token its ratio, and the ratio's derivative by each log-prob."""
    tokens = credited(row)
    if level == "token":
        return {t: (ratio(log_ratio(row, t))[0], {t: ratio(log_ratio(row, t))[1]}) for t in tokens}
    if not tokens:
        return {}
    s, slope = ratio(math.fsum(log_ratio(row, t) for t in tokens) / len(tokens))
    if level == "sequence":  # GSPO, equation 7: a geometric mean, so each token moves it by s / |o|
        return {t: (s, {u: slope / len(tokens) for u in tokens}) for t in tokens}
    return {t: (s, {t: slope}) for t in tokens}  # GSPO-token, equation 14: the token's own derivative alone


# --- policy losses: row -> token -> (loss, its derivative by each log-prob) -------------------------------------------


def clipped(row, *, epsilon, epsilon_high=None, delta=None, level="token"):
    low, high = 1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high)
    delta = math.inf if delta is None else delta
    A, out = row["A"], {}
    for t, (r, dr) in ratios(row, level).items():
        free, bounded = min(r, delta) * A, max(low, min(high, r)) * A
        free_slope, bounded_slope = float(r <= delta), float(low <= r <= high)
        slope = free_slope if free < bounded else bounded_slope
        if free == bounded:
            slope = (free_slope + bounded_slope) / 2
        out[t] = (-min(free, bounded), {u: -A * slope * d for u, d in dr.items()})
    return out


def sapo(row, *, pos, neg, level="token"):
    A, out = row["A"], {}
    tau = pos if A > 0 else neg
    for t, (r, dr) in ratios(row, level).items():
        x = tau * (r - 1)
        p, q = (1 / (1 + math.exp(-x)), 1 / (1 + math.exp(x))) if abs(x) < 700 else (float(x > 0), float(x < 0))
        # f = 4 / tau * sigmoid(tau * (r - 1)), f' = 4 * p * (1 - p)
        out[t] = (-4 / tau * p * A, {u: -A * 4 * p * q * d for u, d in dr.items()})
    return out


def gmpo(row, *, epsilon, epsilon_high=None):
    low, high = epsilon, epsilon if epsilon_high is None else epsilon_high
    A, tokens = row["A"], credited(row)
    if not tokens:
        return {}
    logs, free = {}, {}
    for t in tokens:
        d = log_ratio(row, t)
        # min(rho, e^high) where A > 0; where A < 0, (min(1 / rho, e^low))^-1 = max(rho, e^-low)
        logs[t], free[t] = (min(d, high), d <= high) if A > 0 else (max(d, -low), d >= -low)
    value, slope = ratio(math.fsum(logs.values()) / len(tokens))
    return {t: (-value * A, {u: -A * slope * free[u] / len(tokens) for u in tokens}) for t in tokens}


def cispo(row, *, cap, level="token"):
    A, out = row["A"], {}
    for t, (r, _) in ratios(row, level).items():
        weight = min(r, cap)
        out[t] = (-weight * A * row["logp"][t], {t: -weight * A})
    return out


def vespo(row, *, k_pos, lambda_pos, k_neg, lambda_neg):
    A, tokens = row["A"], credited(row)
    k, lam = (k_pos, lambda_pos) if A >= 0 else (k_neg, lambda_neg)
    log_w = min(math.fsum(log_ratio(row, t) for t in tokens), CUT)
    exponent = k * log_w + lam * (1 - math.exp(log_w))
    phi = math.exp(exponent) if exponent > -700 else 0.0
    return {t: (-phi * A * row["logp"][t], {t: -phi * A}) for t in tokens}


def reinforce(row, *, weighted):
    A, out = row["A"], {}
    for t in credited(row):
        weight = ratio(log_ratio(row, t))[0] if weighted else 1.0
        out[t] = (-weight * A * row["logp"][t], {t: -weight * A})
    return out


# --- aggregations -----------------------------------------------------------------------------------------------------


def weights(name: str, rows: list[dict], length: int) -> list[list[float]]:
    """What each token's loss is multiplied by, so that the sum is the objective: w / Z."""
    lengths = [len(credited(row)) for row in rows]
    total = sum(lengths)
    share = {
        "token_mean": lambda i: 1 / total if total else 0.0,
        "micro_batch_token_mean": lambda i: 1 / max(total, 1),
        "sequence_mean": lambda i: 1 / max(lengths[i], 1) / len(rows),
        "sequence_sum": lambda i: 1 / len(rows),
        "fixed_length": lambda i: 1 / length / len(rows),
    }[name]
    return [[share(i) if m else 0.0 for m in row["mask"]] for i, row in enumerate(rows)]


def objective(rows, loss, token_weights):
    """Value, the sum of its terms' sizes, and the gradient by each log-prob."""
    value, size = [], []
    gradient = [[0.0] * len(row["mask"]) for row in rows]
    for i, row in enumerate(rows):
        for t, (term, slopes) in loss(row).items():
            value.append(token_weights[i][t] * term)
            size.append(abs(value[-1]))
            for u, slope in slopes.items():
                gradient[i][u] += token_weights[i][t] * slope
    return math.fsum(value), math.fsum(size), gradient


# --- KL ---------------------------------------------------------------------------------------------------------------


def kl(name: str, logp: float, ref: float) -> tuple[float, float]:
    """The estimate of one token and its derivative by logp, with d = ref - logp."""
    d = ref - logp
    if name == "k1":
        return -d, 1.0
    if name == "k2":
        return d * d / 2, -d
    if d > CUT:
        return math.expm1(CUT) - CUT, 0.0
    # exp(d) - d - 1 cancels near 0: its series is d^2 / 2 + d^3 / 6 + ...
    value = math.fsum(d**n / math.factorial(n) for n in range(2, 20)) if abs(d) < 0.5 else math.exp(d) - d - 1
    return value, -math.expm1(d)


# --- advantages -------------------------------------------------------------------------------------------------------


def mean(values):
    if min(values) == max(values):  # which the quotient may miss by a rounding
        return values[0]
    return math.fsum(values) / len(values)


def deviation(values, ddof):
    if len(values) <= ddof:
        return 0.0
    centre = mean(values)
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / (len(values) - ddof))


def scored(values):
    return [v for v in values if v == v]


def advantage(name, groups, ddof=1, eps=1e-4):
    """groups: lists of rewards, NaN = unscorable."""
    everything = [v for group in groups for v in scored(group)]
    within = [v - mean(scored(group)) for group in groups for v in scored(group)]
    out = []
    for group in groups:
        known, row = scored(group), []
        for i, r in enumerate(group):
            if r != r:
                row.append(0.0)
            elif name == "group_zscore":
                row.append((r - mean(known)) / (deviation(known, ddof) + eps))
            elif name == "group_center":
                row.append(r - mean(known))
            elif name == "leave_one_out":
                others = [v for j, v in enumerate(group) if j != i and v == v]
                row.append(r - mean(others) if others else 0.0)
            elif name == "batch_zscore":
                row.append((r - mean(known)) / (deviation(everything, ddof) + eps))
            elif name == "global_zscore":
                row.append((r - mean(everything)) / (deviation(everything, ddof) + eps))
            elif name == "group_center_global_std":
                row.append((r - mean(known) - mean(within)) / (deviation(within, ddof) + eps))
            else:
                raise KeyError(name)
        out.append(row)
    return out


def normalize_then_sum(groups, weights, ddof=1, eps=1e-4):
    """groups: lists of completions, each a list of one reward per function, NaN = does not apply."""
    each = [advantage("group_zscore", [[c[k] for c in g] for g in groups], ddof, eps) for k in range(len(weights))]
    total = [
        [math.fsum(w * a[p][i] for w, a in zip(weights, each, strict=True)) for i in range(len(group))]
        for p, group in enumerate(groups)
    ]
    known = [total[p][i] for p, group in enumerate(groups) for i, c in enumerate(group) if any(r == r for r in c)]
    out = []
    for p, group in enumerate(groups):
        row = []
        for i, c in enumerate(group):
            all_missing = all(r != r for r in c)
            row.append(0.0 if all_missing else (total[p][i] - mean(known)) / (deviation(known, ddof) + eps))
        out.append(row)
    return out


# --- masks and corrections --------------------------------------------------------------------------------------------


def keep_sequence(row, threshold):
    tokens = credited(row)
    if row["A"] >= 0 or not tokens:
        return row["A"] >= 0 or threshold >= 0
    drifts = [-log_ratio(row, t) for t in tokens]
    return math.fsum(0.0 if d != d else d for d in drifts) / len(tokens) <= threshold


def quantile(values, q):
    """Linear interpolation between the two order statistics around place q * (n - 1)."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def correction(name, row, sampler, clip_min, clip_max):
    """One weight per token, or one for the completion: ``row['logp']`` against the sampler's log-probs."""
    level, kind = name.split("_")
    d = [row["logp"][t] - sampler[t] if m and sampler[t] == sampler[t] else 0.0 for t, m in enumerate(row["mask"])]
    count = max(len(credited(row)), 1)
    exponents = {"token": d, "sequence": [math.fsum(d)], "geometric": [math.fsum(d) / count]}[level]
    out = []
    for x in exponents:
        r = ratio(x)[0]
        if kind == "truncate":
            r = r if clip_min is None else max(r, clip_min)
            r = r if clip_max is None else min(r, clip_max)
        elif (clip_min is not None and r < clip_min) or (clip_max is not None and r > clip_max):
            r = 0.0
        out.append(r)
    return out
