"""Towers, shared layers, dictionaries, wrappers."""

from __future__ import annotations

from .copying import put, value
from .pair import links, normal, pair, straight

WIDTH = 8
VECTORS = (normal(3, WIDTH),)


def towers(kit):
    """Two towers of the same shapes, the query's first."""

    def tower():
        return kit.Sequential(kit.linear(WIDTH, WIDTH), kit.ReLU(), kit.linear(WIDTH, WIDTH), kit.layernorm(WIDTH))

    class TwoTowers(kit.Net):
        def build(self):
            self.query_tower, self.document_tower = tower(), tower()
            self.temperature = kit.param(1)

        def forward(self, query, document):
            return self.query_tower(query) @ kit.permute(self.document_tower(document), (1, 0)) * self.temperature

    return TwoTowers()


def other_towers(kit):
    """The document's first, all in an inner layer."""

    class Tower(kit.Net):
        def build(self):
            self.norm = kit.layernorm(WIDTH)
            self.hidden, self.output = kit.linear(WIDTH, WIDTH), kit.linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.norm(self.output(kit.relu(self.hidden(x))))

    class Retriever(kit.Net):
        def build(self):
            self.doc_encoder, self.query_encoder = Tower(), Tower()
            self.logit_scale = kit.param(1)

        def forward(self, query, document):
            document, query = self.doc_encoder(document), self.query_encoder(query)
            return query @ kit.permute(document, (1, 0)) * self.logit_scale

    return Retriever()


TOWERS = links(
    """
    (root)             (root)
    query_tower.0      query_encoder.hidden
    query_tower.2      query_encoder.output
    query_tower.3      query_encoder.norm
    document_tower.0   doc_encoder.hidden
    document_tower.2   doc_encoder.output
    document_tower.3   doc_encoder.norm
    """
)


def carry_towers(ref, cand):
    straight(TOWERS[1:])(ref, cand)
    put(cand, "(root)", "logit_scale", value(ref, "(root)", "temperature"))


def shared(kit):
    """One layer called three times."""

    class Recurrent(kit.Net):
        def build(self):
            self.into, self.step, self.out = kit.linear(WIDTH, WIDTH), kit.linear(WIDTH, WIDTH), kit.linear(WIDTH, 3)

        def forward(self, x):
            x = self.into(x)
            for _ in range(3):
                x = x + kit.tanh(self.step(x))
            return self.out(x)

    return Recurrent()


def shared_in_list(kit):
    """The same layer, found three times in a list."""

    class Universal(kit.Net):
        def build(self):
            self.output_layer = kit.linear(WIDTH, 3)
            inner = kit.named(transition=kit.linear(WIDTH, WIDTH), act=kit.Tanh())
            self.steps = kit.List([inner, inner, inner])
            self.input_layer = kit.linear(WIDTH, WIDTH)

        def forward(self, x):
            x = self.input_layer(x)
            for step in self.steps:
                x = x + step(x)
            return self.output_layer(x)

    return Universal()


SHARED = links("into input_layer\n step steps.0.transition\n out output_layer")


def multitask(kit):
    """A trunk with two heads; an auxiliary head that is defined and never runs."""

    class MultiTask(kit.Net):
        def build(self):
            self.trunk = kit.Sequential(kit.linear(WIDTH, WIDTH), kit.layernorm(WIDTH), kit.ReLU())
            self.head_age, self.head_sex = kit.linear(WIDTH, 3), kit.linear(WIDTH, 3)
            self.head_unused = kit.linear(WIDTH, 3)

        def forward(self, x):
            x = self.trunk(x)
            return kit.cat([self.head_age(x), self.head_sex(x)], 1)

    return MultiTask()


def wrapped_multitask(kit):
    """The heads in a dictionary in the other order, in two wrappers."""

    class Inner(kit.Net):
        def build(self):
            self.heads = kit.Dict({"sex": kit.linear(WIDTH, 3), "age": kit.linear(WIDTH, 3)})
            self.norm, self.fc = kit.layernorm(WIDTH), kit.linear(WIDTH, WIDTH)

        def forward(self, x):
            x = kit.relu(self.norm(self.fc(x)))
            return kit.cat([self.heads["age"](x), self.heads["sex"](x)], 1)

    return kit.named(module=kit.named(model=Inner()))


MULTITASK = links(
    """
    trunk.0    module.model.fc
    trunk.1    module.model.norm
    head_age   module.model.heads.age
    head_sex   module.model.heads.sex
    """
)


PAIRS = (
    # Two towers of the same shapes, in the other order; their names tell. A root parameter on both sides.
    pair("towers", towers, other_towers, (*VECTORS, normal(4, WIDTH, seed=6)), TOWERS, carry_towers),
    # A layer called three times against a layer found under three paths.
    pair("shared_layer", shared, shared_in_list, VECTORS, SHARED),
    # Two heads of one shape, in the other order; wrappers; a head of the reference that has no partner.
    pair("heads_in_wrappers", multitask, wrapped_multitask, VECTORS, MULTITASK, extra=(("head_unused",), ())),
)
