"""The algorithms of RLHF as pure functions of tensors: no files, no models, no tracking.

- `types`: what a loss and an advantage estimator return; joining the metrics of micro-batches.
- `masking`: masks that select, and the one reduction from a token table to a loss.
- `logprobs`: log-probabilities and entropy from logits, aligned with the tokens they predict.
- `kl`: estimators of KL(policy || reference), their value and their gradient; the KL loss.
- `advantages`: token rewards, GAE, reward-to-go, group baselines; `estimate` calls one by name.
- `policy_losses`: clipped surrogates, REINFORCE, the value loss and the entropy bonus.
- `preference_losses`: learning from pairs without a reward model: DPO and IPO.
- `reward_model_losses`: Bradley-Terry, pairwise accuracy, committee aggregates.

Letters in shapes: B sequences, P prompts, G samples per prompt (B = P*G, a prompt's samples are
neighbours), T response tokens, S all tokens, V vocabulary, M committee members. A mask is True
where the element counts. An RL algorithm is three independent names: an advantage estimator, a
policy loss and a placement of the KL term.
"""
