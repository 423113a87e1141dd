"""The algorithms of RLHF as pure functions of tensors: no files, no models, no tracking.

- `types`: what a loss and an advantage estimator return; joining the metrics of micro-batches.
- `masking`: masks that select, and the one reduction from a token table to a loss.
- `logprobs`: log-probabilities and entropy from logits, aligned with the tokens they predict.
- `kl`: estimators of KL(policy || reference), their value and their gradient; the KL loss; its controller.
- `advantages`: token rewards, GAE, reward-to-go, baselines, groups.
- `truncation`: what is done about responses that the length limit cut.
- `policy_losses`: clipped surrogates and their kin, the value loss, the entropy bonus, importance correction.
- `preference_losses`: learning from pairs without a reward model: DPO and its kin.
- `reward_model_losses`: Bradley-Terry, ties, rankings, steps; committee aggregates, weight averaging.
- `imitation`: rewards from demonstrations: maximum-entropy IRL, GAIL, AIRL.
- `recurrent`: the TD loss of a recurrent Q function under partial observability.
- `parts`: parts by name or import path; a part's signature says what it reads and which options it has.

Letters in shapes: B sequences, P prompts, G samples per prompt (B = P*G, a prompt's samples are
neighbours), T response tokens, S all tokens, V vocabulary, M committee members. A mask is True
where the element counts. An RL algorithm is three independent names: an advantage estimator, a
policy loss and a placement of the KL term; each registry (ADVANTAGES, POLICY_LOSSES, ...) is a plain dict.
"""
