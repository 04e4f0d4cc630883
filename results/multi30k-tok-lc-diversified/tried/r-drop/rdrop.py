"""R-Drop (Liang et al. 2021, https://arxiv.org/abs/2106.14448) with its gradient in closed form."""

import torch

from vanilla_transformer import VanillaTransformerForConditionalGeneration

# target positions whose scores are in float32 at a time; they should fit into the cache
ROWS = 64


class RDropLoss(torch.autograd.Function):
    """The loss of two passes over the same targets, and its gradient, a few rows at a time.

    The loss is the label-smoothed cross entropy, the mean over both passes, plus
    `alpha / 4 * (KL(first, second) + KL(second, first))`, the mean over the targets. With autograd,
    the same formulas take several times as long, because their temporary tensors do not fit into
    the cache.
    """

    @staticmethod
    def forward(ctx, logits, labels, smoothing, alpha):  # [2 * targets, V], [targets]
        num_targets, vocab_size = len(labels), logits.shape[-1]
        mean, weight = 1 / (2 * num_targets), alpha / (4 * num_targets)
        logits_grad = torch.empty_like(logits)
        loss = logits.new_zeros((), dtype=torch.float32)
        for start in range(0, num_targets, ROWS):
            target = labels[start : start + ROWS, None]
            rows = [slice(start, start + len(target))]
            rows.append(slice(num_targets + start, num_targets + start + len(target)))
            log_probs = [logits[each].float().log_softmax(-1) for each in rows]
            probs = [each.exp() for each in log_probs]
            for each in log_probs:
                loss -= mean * (1 - smoothing) * each.gather(1, target).sum()
                loss -= mean * smoothing / vocab_size * each.sum()
            log_ratio = log_probs[0].sub_(log_probs[1])
            for this, other, sign in ((0, 1, 1.0), (1, 0, -1.0)):
                divergence = sign * (probs[this] * log_ratio).sum(-1, keepdim=True)
                loss += weight * divergence.sum()
                # cross entropy: p - q; divergences: p (log_ratio - divergence) + p - p_other
                grad = probs[this] * (mean + weight * (1 - divergence))
                grad.addcmul_(probs[this], log_ratio, value=sign * weight)
                grad.sub_(probs[other], alpha=weight).sub_(mean * smoothing / vocab_size)
                grad.scatter_add_(1, target, grad.new_full(target.shape, -mean * (1 - smoothing)))
                logits_grad[rows[this]] = grad
        ctx.save_for_backward(logits_grad)
        return loss

    @staticmethod
    def backward(ctx, loss_grad):
        return ctx.saved_tensors[0] * loss_grad, None, None, None


class RDrop(VanillaTransformerForConditionalGeneration):
    alpha, label_smoothing = 5.0, 0.1

    def __init__(self, config):
        super().__init__(config)
        # on a CPU in bf16, the backward pass of torch's attention takes most of a step
        self.set_attn_implementation("eager")

    def forward(
        self, input_ids=None, attention_mask=None, decoder_input_ids=None, labels=None, **kwargs
    ):
        inputs = (input_ids, attention_mask, decoder_input_ids)
        if labels is None or not self.training:
            return super().forward(*inputs, labels=labels, **kwargs)
        # two passes that drop different values are one batch of twice the size
        output = super().forward(*(torch.cat((each, each)) for each in inputs), **kwargs)
        is_target = labels != -100
        output.loss = RDropLoss.apply(
            output.logits[is_target.repeat(2, 1)],
            labels[is_target],
            self.label_smoothing,
            self.alpha,
        )
        output.logits = output.logits.chunk(2)[0]
        return output
