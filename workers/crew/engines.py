"""The engines of a crew: simulated ones of one model, whose tokenizer is read once."""

from __future__ import annotations

from pathlib import Path

from infra.config import WorkerConfig
from infra.model_folder import open_model_folder
from pipeline.cost_model import scaled
from schemas.subjects import served
from workers.crew.plan import CrewWorker
from workers.crew.steps import NotedClock
from workers.engine.engine import Engine
from workers.engine.scheduler import EngineConfig
from workers.engine.simulated import AnswerTokens, build_simulated


class CrewEngines:
    """Makes them. Reads the model's folder, which takes a while.

    Raises:
        ModelUnsupported: it can't be served.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._facts = open_model_folder(Path(config.model.source))
        self._answers = AnswerTokens.from_folder(self._facts.path)

    @property
    def served(self) -> str:
        """The ``<model@rev>`` of all of them."""
        return served(self._config.model.name, self._facts.revision)

    def make(self, worker: CrewWorker, clock: NotedClock) -> Engine:
        """The engine of one worker. Its steps wait for nothing: ``clock`` is told when they end."""
        engine = build_simulated(
            self._facts.path,
            answers=self._answers,
            num_blocks=worker.num_blocks,
            block_size=self._config.block_size,
            context_length=self._facts.context_length,
            eos_token_ids=self._facts.eos_token_ids,
            costs=scaled(worker.costs, 1 / self._config.speed),
            token_bytes=worker.kv_token_bytes,
            clock=clock,
            config=EngineConfig(
                max_num_sequences=worker.max_num_sequences,
                max_batch_tokens=worker.max_batch_tokens,
            ),
        )
        engine.pace.clock = clock.read
        engine.meter.profile = worker.profile
        engine.meter.profile = worker.profile
        return engine
