"""A transformer for texts whose last layer knows how sure it is, trained by `transformers.Trainer`.

python examples/hugging_face.py [EPOCHS]

The model is made from a config, small and without pretrained weights, so that nothing is
downloaded. With `AutoModel.from_pretrained(...)` as the backbone the rest stays as it is.
"""

import sys
import tempfile

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import AutoModel, BertConfig, Trainer, TrainingArguments, set_seed

from pyro_dak import DAKHead

VOCABULARY, LENGTH = 30, 12


class TextClassifier(nn.Module):
    """A backbone, and a `DAKHead` on the features of its first token."""

    def __init__(self, backbone: nn.Module, num_classes: int, num_data: int):
        super().__init__()
        self.backbone = backbone
        self.head = DAKHead(backbone.config.hidden_size, num_classes, num_data=num_data)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        output = self.backbone(input_ids=input_ids, attention_mask=attention_mask)
        features = output.last_hidden_state[:, 0]
        result = {} if labels is None else {"loss": self.head.loss(features, labels)}
        return result if self.training else result | {"logits": self.head(features).log_probs}


class Texts(Dataset):
    """Random words; the class of a text is which of three words it has most of."""

    def __init__(self, num_rows: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        words = torch.randint(1, VOCABULARY, (num_rows, LENGTH), generator=generator)
        is_known = torch.rand(num_rows, LENGTH, generator=generator) < 0.5
        known = torch.randint(1, 4, (num_rows, LENGTH), generator=generator)
        self.words = torch.where(is_known, known, words)
        self.words[:, 0] = 0  # the token whose features are taken
        self.labels = torch.stack([(self.words == k).sum(-1) for k in (1, 2, 3)]).argmax(0)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words = self.words[index]
        return {
            "input_ids": words,
            "attention_mask": torch.ones_like(words),
            "labels": self.labels[index],
        }


def main(epochs: int) -> None:
    set_seed(0)
    train, test = Texts(1500, seed=0), Texts(500, seed=1)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
    )
    backbone = AutoModel.from_config(config, add_pooling_layer=False)
    model = TextClassifier(backbone, num_classes=3, num_data=len(train))
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            num_train_epochs=epochs,
            per_device_train_batch_size=50,
            per_device_eval_batch_size=500,
            learning_rate=3e-3,
            use_cpu=True,
            report_to="none",
            save_strategy="epoch",
            save_total_limit=1,
            disable_tqdm=True,
            logging_strategy="no",
        )
        trainer = Trainer(model, arguments, train_dataset=train, eval_dataset=test)
        trainer.train()
        output = trainer.predict(test)
    log_probs = torch.tensor(output.predictions)
    accuracy = (log_probs.argmax(-1) == test.labels).float().mean()
    nll = nn.functional.nll_loss(log_probs, test.labels)
    print(f"accuracy {accuracy:.3f}, NLL {nll:.3f}")


if __name__ == "__main__":
    main(epochs=int(sys.argv[1]) if len(sys.argv) > 1 else 15)
