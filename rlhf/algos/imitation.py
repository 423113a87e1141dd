"""Reward from demonstrations: maximum-entropy inverse reinforcement learning, GAIL and AIRL.

Everywhere the expert is the positive class: D = sigmoid(logit) is the probability that a sample
comes from the expert, and a reward that rises with D makes the policy look like one. Log-probs are
those of the policy that sampled, in nats; they are constants to every loss here. What a sample is,
is the caller's choice: a whole trajectory (sums of rewards and log-probs, where the probabilities
of the environment cancel) or a single step.
"""

import math

from torch import Tensor
from torch.nn.functional import softplus

from rlhf.algos.masking import check_devices, check_mask, select
from rlhf.algos.reward_model_losses import mean_of
from rlhf.algos.types import LossOutput


def _check_samples(name: str, first: Tensor, *others: Tensor) -> None:
    if first.ndim != 1 or not len(first):
        raise ValueError(f"need at least one {name}, as (N,); got shape {tuple(first.shape)}")
    _check_same(first, *others)


def _check_same(first: Tensor, *others: Tensor) -> None:
    for other in others:
        if other.shape != first.shape:
            raise ValueError(f"shapes differ: {tuple(first.shape)}, {tuple(other.shape)}")
    check_devices(first, *others)


def max_ent_irl_loss(
    expert_rewards: Tensor, sampled_rewards: Tensor, sampled_logprobs: Tensor
) -> LossOutput:
    """Negative log-likelihood of the demonstrations (Ziebart et al. 2008; Finn et al. 2016).

    The second, arXiv:1603.00448, is guided cost learning: improve the sampling policy a little on
    the reward, then the reward on its samples, in turn. The model is p(tau) = p_environment(tau)
    exp(r(tau)) / Z. Loss: log Z - mean expert reward, with log Z = log mean exp(r_j - log q_j) over
    samples of any policy q that can reach what the model can. Its gradient is the mean of grad r
    under the self-normalised weights w = softmax(r - log q) minus that over the experts, and 0
    where the two agree.

    The weights correct for who sampled and carry no gradient of their own: sum w r with w not
    detached has another one. log Z has the right gradient and, unlike sum w r, is also the value of
    the likelihood; it is biased low for few samples, and so are the weights towards q. A small
    `effective_sample_fraction` says that q is too far from the model: improve q first. Rewards are
    free up to one constant. The weights need all samples at once, so a loss cannot be split over
    micro-batches.

    Args:
        expert_rewards: (N,) r of the demonstrations, gradient flows.
        sampled_rewards: (M,) r of the samples, gradient flows.
        sampled_logprobs: (M,) nats, log q of all actions of each sample; see `mixture_logprobs` if
            several policies sampled.

    Returns: loss () nats and detached metrics: effective_sample_fraction = 1 / (M sum w^2), from
        1 / M to 1; log_partition_nats; expert_reward_mean; and model_reward_mean, the weighted mean
        of the sampled rewards.

    Raises: ValueError if shapes or devices differ or there is no demonstration or no sample.
    """
    _check_samples("demonstration", expert_rewards)
    _check_samples("sample", sampled_rewards, sampled_logprobs)
    check_devices(expert_rewards, sampled_rewards)
    log_weights = sampled_rewards - sampled_logprobs.detach()
    log_partition = log_weights.logsumexp(0) - math.log(len(log_weights))
    weights = log_weights.detach().softmax(0)
    metrics = {
        "effective_sample_fraction": 1 / (weights.square().sum() * len(weights)),
        "log_partition_nats": log_partition.detach(),
        "expert_reward_mean": expert_rewards.detach().mean(),
        "model_reward_mean": (weights * sampled_rewards.detach()).sum(),
    }
    return LossOutput(log_partition - expert_rewards.mean(), metrics)


def mixture_logprobs(logprobs: Tensor, counts: Tensor) -> Tensor:
    """Log-probs of samples pooled from several policies, under the mixture of them all.

    log sum_k n_k q_k(tau) / sum_k n_k: with it a pool of samples of earlier policies, and of the
    demonstrations under a policy cloned from them, serves `max_ent_irl_loss` as one sampler (Finn
    et al. 2016, arXiv:1603.00448, section 4.2), with weights that no single far policy blows up.

    Args:
        logprobs: (K, M) nats, of every sample under each of the K policies.
        counts: (K,) >= 0, how many of the samples each policy drew.

    Returns: (M,) nats, detached.

    Raises: ValueError if shapes or devices do not fit, a count is negative or all are 0.
    """
    if logprobs.ndim != 2 or counts.shape != logprobs.shape[:1]:
        raise ValueError(f"logprobs {tuple(logprobs.shape)} do not fit {tuple(counts.shape)}")
    check_devices(logprobs, counts)
    shares = counts.to(logprobs.dtype)
    if not (bool((shares >= 0).all()) and bool(shares.sum() > 0)):
        raise ValueError(f"counts must be >= 0 and not all 0, got {counts.tolist()}")
    drew = shares > 0
    log_shares = (shares[drew] / shares.sum()).log()
    return (logprobs.detach()[drew] + log_shares[:, None]).logsumexp(0)


def gail_discriminator_loss(
    expert_logits: Tensor,
    policy_logits: Tensor,
    *,
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Binary cross-entropy of the discriminator, expert = 1 (Ho and Ermon 2016, arXiv:1606.03476).

    mean over experts of -log D + mean over samples of -log(1 - D): both sides weigh the same,
    however many samples each has. Its optimum is D = p_expert / (p_expert + p_policy), 1/2
    everywhere, with loss 2 log 2, once the policy is the expert. The paper's own D is 1 - this one.

    Args:
        expert_logits: (N,), gradient flows.
        policy_logits: (M,), gradient flows.
        denominator: number of samples on each side of an accumulated batch, where both sides have
            as many, or None for N and M.

    Returns: loss () and detached metrics: expert_accuracy and policy_accuracy, the shares told
        rightly (a logit of 0 is a coin, 1/2); expert_logit_mean and policy_logit_mean.

    Raises: ValueError if a side is empty or not (N,), devices differ or the denominator is not
        positive.
    """
    _check_samples("expert logit", expert_logits)
    _check_samples("policy logit", policy_logits)
    check_devices(expert_logits, policy_logits)
    expert = mean_of(softplus(-expert_logits), denominator)
    policy = mean_of(softplus(policy_logits), denominator)
    expert_logits, policy_logits = expert_logits.detach(), policy_logits.detach()
    metrics = {
        "expert_accuracy": (1 + expert_logits.sign()).mean() / 2,
        "policy_accuracy": (1 - policy_logits.sign()).mean() / 2,
        "expert_logit_mean": expert_logits.mean(),
        "policy_logit_mean": policy_logits.mean(),
    }
    return LossOutput(expert + policy, metrics)


def gail_reward(logits: Tensor) -> Tensor:
    """-log(1 - D) = log(1 + exp(logit)), the policy's reward in GAIL.

    Never negative: every step pays, so it draws long episodes out, whatever they do. It cannot be
    optimised again from scratch: at the end D = 1/2 and the reward is log 2 everywhere.

    Args:
        logits: of any shape.

    Returns: the same shape, >= 0, detached.
    """
    return softplus(logits.detach())


def airl_f(
    rewards: Tensor, values: Tensor, next_values: Tensor, dones: Tensor, *, gamma: float
) -> Tensor:
    """A reward and its shaping, f = r + gamma V(s') - V(s) (Fu et al. 2018, arXiv:1710.11248).

    Shaping does not move the optimal policy, so V takes up what depends on the environment, and
    r(s), if it sees the state alone, is what carries over to another one.

    Args:
        rewards: (N,) or any other shape, gradient flows.
        values: V(s), gradient flows.
        next_values: V(s'), gradient flows; not read where the episode ended.
        dones: bool, True where the episode ended; V(s') is 0 there.
        gamma: in [0, 1], the discount that the policy is trained with.

    Returns: the same shape.

    Raises: ValueError if shapes or devices differ, dones is not boolean or gamma is out of bounds.
    """
    check_mask(dones, rewards, values)
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma must lie in [0, 1], got {gamma}")
    return rewards + gamma * select(next_values, ~dones) - values


def airl_logits(f: Tensor, logprobs: Tensor) -> Tensor:
    """Logit f - log pi of AIRL's discriminator D = exp(f) / (exp(f) + pi) (Fu et al. 2018).

    At D = 1/2 everywhere, pi = exp(f): f is a log-probability, with log Z taken up in it.

    Args:
        f: of any shape, gradient flows; see `airl_f`.
        logprobs: the same shape, nats, of the actions under the current policy; constants.

    Returns: the same shape.

    Raises: ValueError if shapes or devices differ.
    """
    _check_same(f, logprobs)
    return f - logprobs.detach()


def airl_discriminator_loss(
    expert_f: Tensor,
    expert_logprobs: Tensor,
    policy_f: Tensor,
    policy_logprobs: Tensor,
    *,
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """`gail_discriminator_loss` of `airl_logits`: a discriminator with a reward inside.

    For a fixed policy its optimum is f = log p_expert, on whatever the policy or the expert visits.

    Args:
        expert_f: (N,), gradient flows.
        expert_logprobs: (N,) nats, of the expert's actions under the current policy.
        policy_f: (M,), gradient flows.
        policy_logprobs: (M,) nats, of the policy's own actions.
        denominator: see `gail_discriminator_loss`.

    Returns: as `gail_discriminator_loss`.

    Raises: ValueError as `gail_discriminator_loss`, or if shapes differ.
    """
    return gail_discriminator_loss(
        airl_logits(expert_f, expert_logprobs),
        airl_logits(policy_f, policy_logprobs),
        denominator=denominator,
    )


def airl_reward(f: Tensor, logprobs: Tensor) -> Tensor:
    """The policy's reward in AIRL, log D - log(1 - D) = f - log pi: f and an entropy bonus.

    Its expected policy gradient descends KL(policy || exp(f) / Z).

    Args:
        f: of any shape.
        logprobs: the same shape, nats, of the actions under the policy that sampled them.

    Returns: the same shape, detached.

    Raises: ValueError if shapes or devices differ.
    """
    return airl_logits(f.detach(), logprobs)
