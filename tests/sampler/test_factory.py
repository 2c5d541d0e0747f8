"""Samplers that a configuration names: which ones are sent to the controller, and how they are created."""

from __future__ import annotations

import pytest
from omegaconf import DictConfig, OmegaConf

from transfer_queue.config.settings import Settings
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.sampler import BUILT_IN, BaseSampler, GRPOGroupNSampler, SequentialSampler
from transfer_queue.sampler.factory import sampler_from, sampler_objects


class Newest(BaseSampler):
    """A user's sampler."""

    def sample(self, ready_indexes, batch_size, *args, **kwargs):
        rows = list(ready_indexes)[-batch_size:]
        return rows, rows


class NeedsAnArgument(Newest):
    def __init__(self, bound):
        super().__init__()
        self.bound = bound


def held(value) -> DictConfig:
    """Return a conf with this sampler, which may be an object."""
    conf = OmegaConf.create({"controller": {"sampler": value}}, flags={"allow_objects": True})
    assert isinstance(conf, DictConfig)
    return conf


def to_send(conf):
    """Return what `init` sends to the controller for a conf."""
    return sampler_objects(Settings.from_config(conf), conf).get("")


class TestSamplerObject:
    def test_a_sampler_that_is_not_built_in_is_sent(self):
        sampler = Newest()
        assert to_send(held(sampler)) is sampler
        assert to_send(held(Newest)) is Newest
        assert to_send(held(f"{__name__}:Newest")) is Newest

    def test_a_built_in_sampler_is_found_by_its_name(self):
        assert to_send(held("RankAwareSampler")) is None
        assert to_send(None) is None


NEEDED = {
    "TokenBudgetSampler": {"token_budget": 8},
    "FreshnessSampler": {"max_staleness": 1, "inner": "SequentialSampler"},
}


class TestSamplerFrom:
    @pytest.mark.parametrize("name", sorted(BUILT_IN))
    def test_built_in(self, name):
        """A built-in name."""
        assert type(sampler_from(name, NEEDED.get(name))).__name__ == name

    def test_arguments(self):
        """Arguments are passed by name; inner samplers by name or with arguments of their own."""
        grpo = sampler_from("GRPOGroupNSampler", {"n_samples_per_prompt": 4})
        assert grpo.n_samples_per_prompt == 4
        path = f"{__name__}:NeedsAnArgument"
        assert sampler_from(path, {"bound": 3}).bound == 3
        inner = {"sampler": "PrioritySampler", "sampler_args": {"aging": 2, "inner": "RankAwareSampler"}}
        sampler = sampler_from("FreshnessSampler", {"max_staleness": 1, "inner": inner})
        assert (type(sampler.inner).__name__, sampler.inner.aging) == ("PrioritySampler", 2.0)
        assert type(sampler.inner.inner).__name__ == "RankAwareSampler"

    @pytest.mark.parametrize(
        ("sampler", "args", "words"),
        [
            ("TokenBudgetSampler", {"token_budget": 0}, "TokenBudgetSampler: token_budget, .*must be posit"),
            ("TokenBudgetSampler", {"budget": 8}, "TokenBudgetSampler: token_budget, .*'budget'"),
            ("TokenBudgetSampler", {}, " is .*called without arguments or with those of controller.sampler_args"),
            ("FreshnessSampler", {"max_staleness": 1, "inner": {"name": "X"}}, "has the keys sampler and sampler_args"),
            ("FreshnessSampler", {"max_staleness": 1, "inner": "Nobody"}, "'Nobody'; allowed"),
            ("FreshnessSampler", {"max_staleness": 1, "inner": 5}, "inner of FreshnessSampler must be a sampler"),
            ("SequentialSampler", {"inner": object()}, "plain values, or pass an instance"),
            ("SequentialSampler", [1], "a mapping of the arguments"),
            (GRPOGroupNSampler(2), {"n_samples_per_prompt": 2}, "nothing if controller.sampler is an instance"),
        ],
    )
    def test_wrong_arguments(self, sampler, args, words):
        """Wrong arguments are found when the conf is read, and named by their key."""
        conf = held(sampler)
        conf.controller.sampler_args = args
        with pytest.raises(InvalidArgumentError, match=f"controller.sampler.*{words}"):
            to_send(conf)

    def test_arguments_are_sent_as_json_values(self):
        """As JSON values, interpolations resolved."""
        args = {"token_budget": "${controller.budget}", "dp_size": 2}
        conf = {"controller": {"sampler": "TokenBudgetSampler", "sampler_args": args, "budget": 64}}
        settings = Settings.from_config(conf)
        assert Settings.from_json(settings.to_json()).sampler_args == {"token_budget": 64, "dp_size": 2}
        assert Settings.from_config().sampler_args == {}
        assert Settings.from_config({"controller": {"sampler_args": None}}).sampler_args == {}

    @pytest.mark.parametrize("separator", [":", "."])
    def test_import_path(self, separator):
        """ "package.module:Class" and "package.module.Class"."""
        path = f"transfer_queue.sampler.sequential_sampler{separator}SequentialSampler"
        assert type(sampler_from(path)) is SequentialSampler

    def test_class_and_instance(self):
        """A class is called, an instance is used itself."""
        sampler = GRPOGroupNSampler(4)
        assert sampler_from(sampler) is sampler
        assert type(sampler_from(Newest)) is Newest

    def test_any_object_that_samples(self):
        """An object with a `sample` is a sampler, whatever its class."""

        class Duck:
            def sample(self, ready_indexes, batch_size, *args, **kwargs):
                return [], []

        assert type(sampler_from(Duck)) is Duck

    @pytest.mark.parametrize("name", ["NoSuchSampler", "no.such.module:Sampler", "json:NoSuchClass", "", ":", "a:"])
    def test_unknown(self, name):
        """An unknown name is a ValueError naming it."""
        with pytest.raises(ValueError, match=r"controller\.sampler is '.*'; allowed: SequentialSampler, ") as error:
            sampler_from(name)
        assert repr(name) in str(error.value)

    def test_an_unknown_name_is_an_error_with_the_nearest_built_in_one(self):
        with pytest.raises(InvalidArgumentError, match=r"did you mean 'PrioritySampler'\?$"):
            sampler_from("PriortySampler")

    @pytest.mark.parametrize("value", ["json:dumps", "json:JSONDecoder", 5, None, dict])
    def test_an_object_that_is_not_a_sampler_is_refused(self, value):
        """An object that is not a sampler is refused; the error names what is allowed."""
        with pytest.raises(InvalidArgumentError, match="allowed: "):
            sampler_from(value)

    def test_class_that_needs_arguments(self):
        """The error for a class that needs arguments asks for an instance."""
        with pytest.raises(InvalidArgumentError, match="an instance"):
            sampler_from(NeedsAnArgument)
