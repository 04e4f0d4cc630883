"""`Seq2SeqTrainer` with the fused loss and the CPU kernels of this package."""

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import Seq2SeqTrainer

from .data.batches import IGNORED
from .devices.cpu_kernels import use_cpu_kernels, warn_of_emulated_bf16
from .devices.memory import keep_freed_memory
from .step import batch_loss_sum, takes_fused_loss

# inputs of a batch that the fused loss can handle
FUSED_LOSS_INPUTS = {"input_ids", "attention_mask", "decoder_input_ids", "labels"}


class FusedTrainer(Seq2SeqTrainer):
    """`Seq2SeqTrainer` that computes the same training step in fewer passes over memory.

    Arguments, loss and checkpoints are the library's. The library's own step is used for adapters,
    weights that are spread over devices, a compiled model, noise on the embeddings, and the user's
    own inputs or loss. On a CPU, dropout uses a faster random number generator, so it drops other
    values than torch would, but with the same probability.
    """

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Optimizer:
        """Put the CPU kernels of this package into a model on a CPU, and create the optimizer.

        Args:
            args: Positional arguments of `Seq2SeqTrainer.create_optimizer`.
            kwargs: Keyword arguments of `Seq2SeqTrainer.create_optimizer`.

        Returns:
            The optimizer.
        """
        if self.args.device.type == "cpu":
            keep_freed_memory()
            if self.accelerator.mixed_precision == "bf16" and self.is_world_process_zero():
                warn_of_emulated_bf16(
                    "--bf16 false" if self.args.bf16 else "--mixed_precision no of the launcher"
                )
            use_cpu_kernels(self.model, is_half=self.accelerator.mixed_precision != "no")
        return super().create_optimizer(*args, **kwargs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, Any]:
        """Return the loss of a batch; in training, do not keep all logits in memory.

        Args:
            model: Model that the trainer has prepared.
            inputs: Batch, with labels [B, T].
            return_outputs: Whether to return the outputs too.
            num_items_in_batch: Number of target tokens of the whole step; None to count those of
                this batch.

        Returns:
            The loss, or loss and outputs.
        """
        unwrapped_model = self.accelerator.unwrap_model(model)
        can_fuse = (
            model.training
            and "_loss_function" not in vars(unwrapped_model)
            and not return_outputs
            and takes_fused_loss(self.accelerator, model)
            # with another type, the library computes another loss
            and unwrapped_model.loss_type == "ForMaskedLM"
            and not self.is_model_parallel
            and self.compute_loss_func is None
            and self.neftune_noise_alpha is None
            and "labels" in inputs
            and FUSED_LOSS_INPUTS.issuperset(inputs)
        )
        if not can_fuse:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        labels = inputs["labels"]
        label_indices = (labels.flatten() != IGNORED).nonzero().flatten()
        batch = {**inputs, "label_indices": label_indices}
        if "decoder_input_ids" not in batch:
            batch["decoder_input_ids"] = unwrapped_model.prepare_decoder_input_ids_from_labels(
                labels=labels
            )
        smoothing = self.args.label_smoothing_factor
        loss = batch_loss_sum(self.accelerator, model, batch, smoothing)
        if num_items_in_batch is None:
            return loss / len(label_indices)
        # processes average their gradients, but with the token count of all processes the gradients
        # must be summed
        is_total = self.args.average_tokens_across_devices
        num_summed = self.accelerator.num_processes if is_total else 1
        return loss * num_summed / num_items_in_batch
