"""Inputs of every kind, from `fit` to a loaded model: tuples, dictionaries, tokens and bytes.

Each kind has a twin: the same network fed by one floating tensor that holds all parts. The two
compute the same numbers, to the last bit.
"""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pyro
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset, TensorDataset

from pyro_dak import (
    DAK,
    AdditiveGP,
    CategoricalLikelihood,
    ClosedFormELBO,
    JensenELBO,
    MeanFieldGuide,
    NaturalGuide,
    NaturalVI,
    calibrate,
    components,
    exact_posterior,
    learn_novelty,
    load,
    predict,
    run_nuts,
    sample_functions,
    save,
    to_arviz,
)
from pyro_dak.model.batches import Unpacking
from pyro_dak.model.rows import concatenate, num_rows, parts, split, take
from pyro_dak.training.checkpoint import module_tensors
from pyro_dak.training.held_out import hold_out
from tests.training.runs import assert_same, train

N, TOKENS, WORDS = 48, 5, 11


class Tokens(nn.Module):
    """Mean of the embeddings of the tokens that the mask keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(WORDS, 4), nn.Linear(4, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = attention_mask.unsqueeze(-1)
        pooled = (self.embedding(input_ids) * mask).sum(1) / mask.sum(1)
        return self.linear(pooled.tanh())


class PackedTokens(Tokens):
    """The same from one tensor, ids beside the mask."""

    def forward(self, x: Tensor) -> Tensor:
        ids, mask = x.long().chunk(2, -1)
        return super().forward(ids, mask)


class ImageAndTable(nn.Module):
    """Features of an image `(N, 2, 3)` and of a row of a table `(N, 2)`."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.table = nn.Linear(6, 4), nn.Linear(2, 4)

    def forward(self, image: Tensor, table: Tensor) -> Tensor:
        return (self.image(image.flatten(1)) + self.table(table)).tanh()


class PackedImageAndTable(ImageAndTable):
    """The same from one tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, :6].reshape(-1, 2, 3), x[:, 6:])


class Bytes(nn.Module):
    """Features of an image of bytes `(N, 2, 3)`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.to(self.linear.weight.dtype).flatten(1) / 255).tanh()


@dataclass
class Kind:
    """A network with inputs of its kind, and its twin with all parts in one tensor."""

    network: type[nn.Module]
    x: Any
    packed_network: type[nn.Module]
    packed: Tensor

    def model(self, is_packed: bool = False, **options: Any) -> tuple[DAK, Any]:
        torch.manual_seed(1)
        guide = options.pop("guide", MeanFieldGuide)
        network = self.packed_network() if is_packed else self.network()
        model = DAK(network, 4, **({"num_units": 3, "level": 2} | options))
        return model, guide(model)


def kinds() -> dict[str, Kind]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, WORDS, (N, TOKENS), generator=generator)
    lengths = torch.randint(1, TOKENS + 1, (N, 1), generator=generator)
    mask = (torch.arange(TOKENS) < lengths).long()
    image = torch.randn(N, 2, 3, generator=generator, dtype=torch.float64)
    table = torch.randn(N, 2, generator=generator, dtype=torch.float64)
    pixels = torch.randint(0, 256, (N, 2, 3), generator=generator, dtype=torch.uint8)
    words = {"input_ids": ids, "attention_mask": mask}
    flags = {"input_ids": ids, "attention_mask": mask.bool()}
    packed_words = torch.cat([ids, mask], -1).double()
    packed_pair = torch.cat([image.flatten(1), table], -1)
    return {
        "dict": Kind(Tokens, words, PackedTokens, packed_words),
        "truth values": Kind(Tokens, flags, PackedTokens, packed_words),
        "tuple": Kind(ImageAndTable, (image, table), PackedImageAndTable, packed_pair),
        "list": Kind(ImageAndTable, [image, table], PackedImageAndTable, packed_pair),
        "bytes": Kind(Bytes, pixels, Bytes, pixels.double()),
    }


def targets() -> Tensor:
    return torch.randn(N, 1, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.fixture(params=list(kinds()))
def kind(request):
    return kinds()[request.param]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "held out": {"validation": 0.25, "patience": 2},
    "fixed features": {"fixed_features": True},
    "drawn": {"objective": "local"},
    "traced": {"objective": "trace"},
    "natural": {"guide": lambda model: NaturalGuide(model)},
    "autoguide": {"guide": AutoNormal},
}


@pytest.mark.parametrize("name", list(OPTIONS))
def test_fit_predict_save_load_and_predict_equal_those_of_one_tensor(kind, name, tmp_path):
    options = dict(OPTIONS[name])
    made = {"guide": options.pop("guide", MeanFieldGuide)}
    model, guide = kind.model(**made)
    twin, twin_guide = kind.model(is_packed=True, **made)
    history = train(model, guide, (kind.x, targets()), **options)
    expected = train(twin, twin_guide, (kind.packed, targets()), **options)
    assert_close(history.rows, expected.rows, atol=0, rtol=0, equal_nan=True)
    assert_close(history.final, expected.final, atol=0, rtol=0, equal_nan=True)
    assert_same(module_tensors(model, guide), module_tensors(twin, twin_guide))
    prediction, of_twin = predict(model, guide, kind.x), predict(twin, twin_guide, kind.packed)
    assert prediction.mean.equal(of_twin.mean)
    assert prediction.variance.equal(of_twin.variance)
    assert prediction.novelty.equal(of_twin.novelty)
    save(model, guide, tmp_path / "model")
    loaded = load(tmp_path / "model", feature_extractor=kind.network())
    assert loaded.model.input_shape == model.input_shape
    again = predict(*loaded, kind.x)
    assert again.mean.equal(prediction.mean)
    assert again.novelty.equal(prediction.novelty)


def test_classes_have_probabilities_and_novelty_of_one_tensor(kind):
    labels = targets()[:, 0].gt(0).long()
    results = []
    for is_packed, x in ((False, kind.x), (True, kind.packed)):
        model, guide = kind.model(is_packed, num_outputs=2, likelihood=CategoricalLikelihood())
        train(model, guide, (x, labels), validation=(x, labels))
        results.append(predict(model, guide, x))
    assert results[0].log_probs.equal(results[1].log_probs)
    assert results[0].strangeness("entropy").equal(results[1].strangeness("entropy"))


class Rows(Dataset):
    """Rows of inputs as dictionaries, with y among them, as Hugging Face data sets have them."""

    def __init__(self, x: Any, y: Tensor):
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return take(self.x, index) | {"labels": self.y[index]}


class Pairs(Rows):
    """Rows as pairs."""

    def __getitem__(self, index: int) -> Any:
        return take(self.x, index), self.y[index]


@pytest.mark.parametrize("fixed_features", [False, True])
def test_loaders_give_the_weights_of_tensors(kind, fixed_features):
    y, results = targets(), []
    data = [((kind.x, y), {}), (DataLoader(Pairs(kind.x, y), N), {})]
    if isinstance(kind.x, dict):
        data.append((DataLoader(Rows(kind.x, y), N), {"target": "labels"}))
        data.append(({**kind.x, "labels": y}, {"target": "labels"}))
    if isinstance(kind.x, tuple | list):
        third = DataLoader(TensorDataset(*kind.x, y), N)
        data.append((third, {"unpack": lambda batch: (batch[:2], batch[2])}))
    for rows, options in data:
        model, guide = kind.model()
        history = train(model, guide, rows, batch_size=N, fixed_features=fixed_features, **options)
        results.append((history.final["elbo"], module_tensors(model, guide)))
    for elbo, tensors in results[1:]:
        assert_close(elbo, results[0][0])
        for name, tensor in results[0][1].items():
            if "novelty" not in name:  # its rows come in another order
                assert_close(tensors[name], tensor)


@pytest.mark.parametrize("kind_of_loader", ["pairs", "x", "list", "target", "unpack", "iterator"])
def test_a_loader_predicts_what_its_rows_do(kind_of_loader):
    kind, y = kinds()["dict"], targets()
    model, guide = kind.model()
    train(model, guide, (kind.x, y))
    options: dict[str, Any] = {}
    if kind_of_loader == "target":
        loader, options = DataLoader(Rows(kind.x, y), 7), {"target": "labels"}
    elif kind_of_loader == "unpack":
        loader = DataLoader(TensorDataset(*kind.x.values(), y), 7)
        names = [*kind.x]
        options = {"unpack": lambda batch: (dict(zip(names, batch[:2], strict=True)), batch[2])}
    elif kind_of_loader == "x":
        loader = DataLoader(Rows(kind.x, y), 7, collate_fn=lambda rows: {
            name: torch.stack([row[name] for row in rows]) for name in kind.x
        })  # fmt: skip
    else:
        loader = DataLoader(Pairs(kind.x, y), 7)
        loader = {"list": [*loader], "iterator": iter(loader)}.get(kind_of_loader, loader)
    prediction, expected = predict(model, guide, loader, **options), predict(model, guide, kind.x)
    assert_close(prediction.mean, expected.mean)
    assert_close(prediction.log_prob(y), expected.log_prob(y))
    assert_close(prediction.novelty, expected.novelty)


def test_a_loader_of_lone_tensors_predicts_classes_and_draws():
    kind = kinds()["bytes"]
    labels = targets()[:, 0].gt(0).long()
    for guide in (NaturalGuide, AutoNormal):
        model, q = kind.model(num_outputs=2, likelihood=CategoricalLikelihood(), guide=guide)
        train(model, q, (kind.x, labels))
        prediction = predict(model, q, DataLoader(TensorDataset(kind.x), 9), num_samples=20)
        expected = predict(model, q, kind.x, num_samples=20)
        assert_close(prediction.log_probs, expected.log_probs)
        assert_close(prediction.mutual_information, expected.mutual_information)
        assert_close(prediction.strangeness(), expected.strangeness())


def test_joined_predictions_keep_the_covariance_of_outputs():
    kind = kinds()["tuple"]
    y = torch.randn(N, 2)
    model, guide = kind.model(num_outputs=2, guide=AutoNormal)
    train(model, guide, (kind.x, y))
    loader = DataLoader(Pairs(kind.x, y), 10)
    prediction, expected = predict(model, guide, loader), predict(model, guide, kind.x)
    assert prediction.functions.root is not None
    assert_close(prediction.functions.root, expected.functions.root)
    assert_close(prediction.log_prob(y), expected.log_prob(y))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_as_validation_scores_what_tensors_do(kind, shuffle):
    y, results = targets(), []
    for validation in ((kind.x, y), DataLoader(Pairs(kind.x, y), 7, shuffle=shuffle)):
        model, guide = kind.model()
        history = train(model, guide, (kind.x, y), validation=validation, patience=5)
        results.append((history.column("val_nlpd"), history.column("val_rmse")))
    assert_close(results[1], results[0])


def test_a_loader_as_validation_is_what_rows_are_compared_with():
    x, y = torch.randn(450, 2, 3), torch.randn(450, 1)
    kind = Kind(Bytes, x, Bytes, x)
    results = []
    for validation in ((x, y), DataLoader(TensorDataset(x, y), 70, shuffle=True)):
        model, guide = kind.model()
        train(model, guide, (x[:40], y[:40]), validation=validation)
        results.append(model.novelty.tails.leverage)
    assert_close(results[1], results[0])


@pytest.mark.parametrize(("number", "stride"), [(100, 7), (210, 3), (630, 1), (1000, 1)])
def test_of_a_long_loader_rows_from_all_over_are_compared_with(number, stride):
    x, y = torch.randn(630, 2, 3), torch.randn(630, 1)
    model, _ = Kind(Bytes, x, Bytes, x).model()
    loader = DataLoader(TensorDataset(x, y), 64)
    fabric = SimpleNamespace(device=torch.device("cpu"), world_size=1, global_rank=0)
    held_out = hold_out(model, None, loader, 0, fabric, Unpacking())[1]
    assert held_out.sample(number).equal(x[::stride])


def test_a_run_resumes_with_the_weights_of_one_that_was_not_stopped(kind, tmp_path):
    y, data = targets(), (kind.x, targets())
    validation = DataLoader(Pairs(kind.x, y), 7, shuffle=True)
    for rows in (data, DataLoader(Pairs(kind.x, y), 16, shuffle=True)):
        whole = kind.model()
        train(*whole, rows, epochs=3, validation=validation)
        place = tmp_path / type(rows).__name__
        half, options = kind.model(), {"checkpoint_dir": place, "validation": validation}

        def stop(epoch: int, row: Any) -> None:
            if epoch == 2:
                raise RuntimeError("stopped")

        with pytest.raises(RuntimeError, match="stopped"):
            train(*half, rows, epochs=3, callbacks=[stop], **options)
        resumed = kind.model()
        train(*resumed, rows, epochs=3, resume_from=place, **options)
        assert_same(module_tensors(*resumed), module_tensors(*whole))


def test_a_run_with_other_inputs_is_not_resumed(kind, tmp_path):
    train(*kind.model(), (kind.x, targets()), checkpoint_dir=tmp_path)
    other = take(kind.x, torch.arange(N).flip(0))
    with pytest.raises(ValueError, match=r"made with other data \(other values of x"):
        train(*kind.model(), (other, targets()), resume_from=tmp_path)


@pytest.mark.filterwarnings("ignore:The largest r-hat")
def test_everything_that_takes_x_takes_every_kind(kind):
    y, results = targets(), []
    for is_packed, x in ((False, kind.x), (True, kind.packed)):
        model, guide = kind.model(is_packed)
        train(model, guide, (x, y))
        found: list[Any] = [*components(model, guide, x, chunk_size=20)]
        torch.manual_seed(0)
        found.append(sample_functions(model, guide, 3)(x))
        found.append(calibrate(model, guide, x, y, chunk_size=20).number)
        learn_novelty(model, guide, x, x)
        found.append(model.novelty.tails.leverage)
        exact = exact_posterior(model, x, y, chunk_size=20)
        found += [exact.log_evidence, exact.update(model, x, y).guide.loc.detach()]
        run = run_nuts(model, x, y, num_samples=5, warmup_steps=5, progress=False)
        found.append(run.sites["z"])
        found += [elbo.terms(model, guide, x, y) for elbo in (ClosedFormELBO(), JensenELBO())]
        found.append(predict(model, guide, x, chunk_size=20, residual_variance=True).variance)
        natural = NaturalGuide(model)
        found.append(NaturalVI(model, natural).step(x, y))
        natural.update(model, x, y)
        found.append(natural.mean)
        results.append(found)
    assert_close(results[0], results[1], atol=0, rtol=0)


def test_svi_of_pyro_and_additive_gps_take_every_kind(kind):
    y, losses = targets(), []
    for is_packed, x in ((False, kind.x), (True, kind.packed)):
        model, guide = kind.model(is_packed)
        pyro.clear_param_store()
        torch.manual_seed(0)
        svi = SVI(model, guide, Adam({"lr": 0.01}), Trace_ELBO())
        losses.append([svi.step(x, y) for _ in range(2)])
        torch.manual_seed(0)
        gp = AdditiveGP(model.feature_extractor, 4, num_units=3, level=2)
        losses[-1].append(gp(x).sum().item())
    assert losses[0] == losses[1]


def test_arviz_takes_every_kind(kind):
    pytest.importorskip("arviz")
    model, _ = kind.model()
    guide = exact_posterior(model.eval(), kind.x, targets()).guide
    data = to_arviz(model, guide, kind.x, targets(), num_samples=10)
    assert data.log_likelihood["y"].shape[-1] == N


@pytest.mark.usefixtures("no_type_checker")
@pytest.mark.parametrize("name", ["dict", "tuple"])
def test_compiled_runs_give_the_same(name):
    kind = kinds()[name]
    model, guide = kind.model()
    train(model, guide, (kind.x, targets()))
    expected = predict(model, guide, kind.x)
    assert_close(predict(model, guide, kind.x, compile=True).mean, expected.mean)


class Outputs(nn.Module):
    """A network that returns an object, a tuple or a dictionary, as pretrained ones do."""

    def __init__(self, kind: str):
        super().__init__()
        self.linear, self.kind = nn.Linear(3, 4), kind

    def forward(self, x: Tensor) -> Any:
        out = self.linear(x)
        if self.kind == "tuple":
            return out.sum(), out
        return {"pooled": out} if self.kind == "dict" else SimpleNamespace(pooled=out)


FEATURES: dict[str, Any] = {
    "tuple": lambda out: out[1],
    "dict": lambda out: out["pooled"],
    "object": lambda out: out.pooled,
}


@pytest.mark.parametrize("name", list(FEATURES))
def test_a_function_takes_the_features_from_what_a_network_returns(name, tmp_path):
    x, y = torch.randn(N, 3), targets()
    results = []
    for fn in (FEATURES[name], None):
        torch.manual_seed(1)
        network = nn.Linear(3, 4) if fn is None else Outputs(name)
        model = DAK(network, 4, num_units=3, level=2, features=fn)
        guide = MeanFieldGuide(model)
        train(model, guide, (x, y))
        results.append(predict(model, guide, x))
        if fn is not None:
            save(model, guide, tmp_path / "model")
            with pytest.raises(RuntimeError, match="pass it as `features`"):
                load(tmp_path / "model", feature_extractor=Outputs(name))
            loaded = load(tmp_path / "model", feature_extractor=Outputs(name), features=fn)
            assert predict(*loaded, x).mean.equal(results[0].mean)
    assert_close(results[0].mean, results[1].mean)
    assert_close(results[0].novelty, results[1].novelty)


@pytest.mark.slow
def test_a_model_of_hugging_face_is_trained_and_loaded(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "max_position_embeddings": TOKENS}
    sizes |= {"vocab_size": WORDS, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes)
    x, y = transformers.BatchEncoding(kinds()["dict"].x), targets()
    options = {"features": lambda out: out.pooler_output}
    model = DAK(transformers.BertModel(config), 8, num_units=3, level=2, **options)
    guide = NaturalGuide(model)
    loader = DataLoader(Rows(kinds()["dict"].x, y), 16)
    train(model, guide, loader, target="labels", validation=loader)
    expected = predict(model, guide, x)
    assert_close(predict(model, guide, loader, target="labels").mean, expected.mean)
    save(model, guide, tmp_path / "model")
    network = transformers.BertModel(config)
    loaded = load(tmp_path / "model", feature_extractor=network, **options)
    assert predict(*loaded, x).mean.equal(expected.mean)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_mixed_precision_leaves_integers_as_they_are(precision):
    kind = kinds()["dict"]
    torch.set_default_dtype(torch.float32)
    model, guide = kind.model()
    history = train(model, guide, (kind.x, targets().float()), precision=precision)
    assert math.isfinite(history.final["elbo"])
    assert predict(model, guide, kind.x).mean.isfinite().all()


@pytest.mark.usefixtures("no_type_checker")
@pytest.mark.parametrize("name", list(FEATURES))
def test_a_network_that_returns_no_tensor_needs_a_function(name):
    model = DAK(Outputs(name), 4, num_units=3, level=2)
    for call in (model, lambda x: train(model, MeanFieldGuide(model), (x, targets()))):
        with pytest.raises(
            (TypeError, ValueError), match=r"must return a tensor.*Pass `features`, a function"
        ):
            call(torch.randn(N, 3))


def test_a_module_as_features_is_refused():
    with pytest.raises(TypeError, match="last part of `feature_extractor`"):
        DAK(nn.Linear(3, 4), 4, features=nn.Identity())


def test_integer_features_are_refused():
    with pytest.raises(TypeError, match=r"floating features; got torch.int64"):
        DAK(nn.Identity(), 3, num_units=2)(torch.ones(5, 3, dtype=torch.long))


@pytest.mark.parametrize("x", [(torch.zeros(4, 2), torch.zeros(4, 2)), torch.ones(4, 2).long()])
def test_input_units_need_one_floating_tensor(x):
    class First(nn.Module):
        def forward(self, x: Tensor, *others: Tensor) -> Tensor:
            return x.double()

    with pytest.raises(TypeError, match="one floating tensor with a column for each input unit"):
        DAK(First(), 2, num_units=2, input_units=2)(x)


def test_inputs_of_another_shape_than_before_are_named():
    kind = kinds()["dict"]
    model, guide = kind.model()
    train(model, guide, (kind.x, targets()))
    message = (
        r"rows as before, \{'input_ids': int64 \(5,\), 'attention_mask': int64 \(5,\)\}; got a "
        r"dictionary with x\['input_ids'\] of shape \(48, 5\) and torch.int64 on cpu"
    )
    with pytest.raises(ValueError, match=message):
        predict(model, guide, {"input_ids": kind.x["input_ids"]})


def test_pieces_of_rows_join_to_the_rows(kind):
    pieces = split(kind.x, 7)
    assert [num_rows(piece) for piece in pieces] == [7] * 6 + [6]
    joined = parts(concatenate(pieces))
    assert all(joined[name].equal(part) for name, part in parts(kind.x).items())
