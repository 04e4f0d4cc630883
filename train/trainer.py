"""The library's `Seq2SeqTrainer`, with the loss and dropout that training of ours has."""

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import Seq2SeqTrainer

from .data.batches import IGNORED
from .devices.cpu_kernels import suit_processor
from .devices.memory import keep_memory
from .step import batch_loss_sum, takes_fused_loss

# what a batch of a collator may have for the loss to be known from it
KNOWN_INPUTS = {"input_ids", "attention_mask", "decoder_input_ids", "labels"}


class FusedTrainer(Seq2SeqTrainer):
    """A `Seq2SeqTrainer` to which a step of training is the same, in fewer passes over memory.

    Arguments, loss and checkpoints are the library's. What is not the plain training of a model of
    this package (adapters, weights spread over devices, a compiled model, noise on the embeddings,
    inputs or a loss of one's own) is left to the library. On a processor dropout draws from the
    fast generator: as much is dropped, but not the same.
    """

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Optimizer:
        """Make the optimizer, of a model that suits the device.

        Args:
            args: As `Seq2SeqTrainer` takes them.
            kwargs: As `Seq2SeqTrainer` takes them.

        Returns:
            The optimizer.
        """
        if self.args.device.type == "cpu":
            keep_memory()
            suit_processor(self.model, is_half=self.accelerator.mixed_precision != "no")
        return super().create_optimizer(*args, **kwargs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, Any]:
        """The loss of a batch; in training without the scores that it is of.

        Args:
            model: The model, as the trainer has prepared it.
            inputs: A batch, with labels [B, T].
            return_outputs: Whether the outputs are wanted too.
            num_items_in_batch: Target tokens of the whole step, or None for those of this batch.

        Returns:
            The loss, or loss and outputs.
        """
        own = self.accelerator.unwrap_model(model)
        is_plain = (
            model.training
            and "_loss_function" not in vars(own)
            and not return_outputs
            and takes_fused_loss(self.accelerator, model)
            and not self.is_model_parallel
            and self.compute_loss_func is None
            and self.neftune_noise_alpha is None
            and "labels" in inputs
            and KNOWN_INPUTS.issuperset(inputs)
        )
        if not is_plain:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        labels = inputs["labels"]
        places = (labels.flatten() != IGNORED).nonzero().flatten()
        batch = {**inputs, "places": places}
        if "decoder_input_ids" not in batch:
            batch["decoder_input_ids"] = own.prepare_decoder_input_ids_from_labels(labels=labels)
        smoothing = self.args.label_smoothing_factor
        loss = batch_loss_sum(self.accelerator, model, batch, smoothing)
        if num_items_in_batch is None:
            return loss / len(places)
        # processes average their gradients; where the tokens are of all, so has the loss to be
        is_of_all = self.args.average_tokens_across_devices
        return loss * (self.accelerator.num_processes if is_of_all else 1) / num_items_in_batch
