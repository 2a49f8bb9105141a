"""Flat memory for the parameters of torch modules, which become views of it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from mpigossip.config import JobError
from mpigossip.config.readable import print_note_once
from mpigossip.engine.overlapping_tensors import check_separate
from mpigossip.engine.vector import NodeLayout, ParameterLayout, bits, flatten

LOW = (torch.bfloat16, torch.float16)
"""Types of parameters for which float32 master weights are kept, updated and exchanged."""
BLOCK = 1 << 18
"""Number of elements that are compared at a time on a CPU, so that they stay in its cache."""
COMPARED = 1 << 24
"""Number of elements that are compared at a time on a GPU, which needs up to 10 bytes for each."""


class ModuleParameters:
    """Flat float32 parameters and gradients of one module per local node.

    It implements the protocol :class:`~mpigossip.engine.vector.FlatParameters`. Each module has one
    row of the arrays. Its float32 parameters become views of the row, with their strides, so that a
    memory format such as channels_last is preserved. For 16-bit parameters, the row holds the
    master weights, and :meth:`publish` rounds them to the parameters.
    """

    first = (0,)
    inverse: torch.Tensor | None = None
    """Inverse of the scale of `torch.amp.GradScaler`, by which 16-bit gradients are multiplied in
    float32. None: they are not multiplied.
    """

    def __init__(self, models: Sequence[nn.Module]):
        """Move the parameters to flat memory; their values stay the same.

        :param models: one module for each local node; they differ in their values only
        :raises JobError: if no parameter requires gradients; or if one that does is neither
            float32, bfloat16 nor float16, or shares memory with another parameter or a buffer
        """
        for model in models:
            check_separate(model)
        layout = flatten(models[0], types=(torch.float32, *LOW))
        self._lay_out(models, layout, layout)
        self.low = [p.dtype in LOW for p in self.rows[0]]
        self._own_data: list[list[torch.Tensor]] = []
        self._memory_keys: list[list[tuple]] = []
        with torch.no_grad():
            for parameters, row in zip(self.rows, self.full[0], strict=True):
                views = self.cut(row)
                for p, view in zip(parameters, views, strict=True):
                    view.copy_(p)
                    if p.dtype not in LOW:
                        report_shared(p)
                        p.data = own_storage(view)
                self._own_data.append([p.data for p in parameters])
                self._memory_keys.append([_memory_key(p) for p in parameters])
        self.publish()

    def _lay_out(
        self, models: Sequence[nn.Module], flat: NodeLayout, local_layout: ParameterLayout
    ) -> None:
        """Find the trained parameters of all modules, and allocate flat memory for them.

        :param models: one module for each local node
        :param flat: layout of a node, with all of its slots
        :param local_layout: layout of the rows that this process holds in memory
        """
        self.flat = flat
        self.local_layout = local_layout
        named = [dict(model.named_parameters()) for model in models]
        self.rows = [[parameters[name] for name in flat.names] for parameters in named]
        self._owners = [[owner(model, name) for name in flat.names] for model in models]
        self._models = models
        self._paths = [self._module_paths(row) for row in range(len(models))]
        trained = {id(p) for row in self.rows for p in row}
        self.frozen = {name: p for name, p in named[0].items() if id(p) not in trained}
        """Parameters of the first module, by name, that are not part of the flat parameters."""
        device = self.rows[0][0].device
        # The program may have set another default type of torch.
        shape = len(models), local_layout.size
        self.full = [torch.zeros(shape, dtype=torch.float32, device=device)]
        self.x = self.full
        self.g = [torch.empty(0, dtype=torch.float32, device=device)]
        self._cache: dict[int, list[torch.Tensor]] = {}

    def cut(self, row: torch.Tensor) -> list[torch.Tensor]:
        """Return views of a row (P,), one for each parameter.

        The views are cached by the address of the row, because few different rows are used.
        """
        views = self._cache.get(row.data_ptr())
        if views is None:
            if len(self._cache) > 8 * len(self.rows):
                self._cache.clear()
            views = self._cache[row.data_ptr()] = self.local_layout.views(row)
        return views

    def gather(self) -> None:
        """Copy the gradients of all parameters to ``g``; a missing gradient counts as zero.

        Gradients of 16-bit parameters are multiplied by :attr:`inverse`, if it is set.
        """
        if not self.g[0].numel():
            self.g = [torch.zeros_like(x) for x in self.x]
        for parameters, row in zip(self.rows, self.g[0], strict=True):
            for p, view in zip(parameters, self.cut(row), strict=True):
                if p.grad is None:
                    view.zero_()
                else:
                    view.copy_(self._dense(p.grad))
                    if self.inverse is not None and p.dtype in LOW:
                        view.mul_(self.inverse)

    def _dense(self, grad: torch.Tensor) -> torch.Tensor:
        return grad.to_dense() if grad.is_sparse else grad

    def _module_paths(self, row: int) -> list[tuple[nn.Module, str, nn.Module]]:
        """Return (parent, key, submodule) for each submodule that contains a trained parameter.

        ``key`` is the name of the submodule in its parent. A parameter that is tied between several
        modules contributes the submodules on all of its paths.
        """
        trained = {id(p) for p in self.rows[row]}
        paths: dict[tuple[int, str], tuple[nn.Module, str, nn.Module]] = {}
        for name, p in self._models[row].named_parameters(remove_duplicate=False):
            if id(p) not in trained:
                continue
            parent = self._models[row]
            for key in name.split(".")[:-1]:
                child = parent.get_submodule(key)
                paths[id(parent), key] = parent, key, child
                parent = child
        return [*paths.values()]

    def _check_modules(self, row: int) -> None:
        """Raise JobError if a module with trained parameters was replaced or removed.

        A replacement with the same Parameters, such as a compiled layer, is accepted. So is the
        removal of a module if the model still has its trained Parameters in other modules.
        """
        if all(parent._modules.get(key) is child for parent, key, child in self._paths[row]):
            return
        parameters = self._models[row].named_parameters(remove_duplicate=False)
        present = {id(p) for _, p in parameters}
        for name, p in zip(self.flat.names, self.rows[row], strict=True):
            if id(p) not in present:
                raise JobError(replaced_message(name))
        trained = {id(p) for p in self.rows[row]}
        for parent, key, child in self._paths[row]:
            current = parent._modules.get(key)
            trained_ids = {id(p) for p in child.parameters()} & trained
            if current is not None and not trained_ids <= {id(p) for p in current.parameters()}:
                raise JobError(replaced_module_message(key, child, current))
        self._paths[row] = self._module_paths(row)

    def _check_owner(self, row: int, k: int) -> None:
        """Raise JobError if the module now holds another Parameter in place of parameter ``k``.

        :param row: row of the module in the arrays
        :param k: index of the parameter in the layout
        """
        module, key = self._owners[row][k]
        if module._parameters.get(key) is not self.rows[row][k]:
            raise JobError(replaced_message(self.flat.names[k]))

    @contextmanager
    def bind_to(self, row: int, array: torch.Tensor, g: torch.Tensor | None) -> Iterator[None]:
        """Make the parameters of a module views of another array, in float32, inside a block.

        After the block, they have their own memory and their own gradients again.

        :param row: row of the module in the arrays
        :param array: array (rows, P) whose row the parameters become
        :param g: array (rows, P) whose row becomes the gradients of the parameters that are not
            frozen. None: they keep their own gradients, which are converted to float32 and unscaled
            for 16-bit parameters
        """
        if array is self.x[0] and g is None and not any(self.low):
            yield
            return
        parameters = self.rows[row]
        own_data = self._own_data[row]
        grads = [p.grad for p in parameters]
        new_grads = self.cut(g[row]) if g is not None else [None] * len(parameters)
        # As in torch, a parameter that was frozen since the layout was made is not updated.
        new_grads = [
            v if p.requires_grad else None for p, v in zip(parameters, new_grads, strict=True)
        ]
        try:
            for k, (p, view) in enumerate(zip(parameters, self.cut(array[row]), strict=True)):
                if g is not None or self.low[k]:
                    p.grad = None  # torch requires a gradient to have the type of its parameter
                p.data = view
                if g is not None:
                    p.grad = new_grads[k]
                elif self.low[k] and grads[k] is not None:
                    p.grad = grads[k].float()
                    if self.inverse is not None:
                        p.grad.mul_(self.inverse)
            yield
        finally:
            for k, p in enumerate(parameters):
                if p.grad is not grads[k]:
                    p.grad = None
                p.data = own_data[k]
                if p.grad is not grads[k]:
                    p.grad = grads[k]

    @contextmanager
    def in_separate_memory(self) -> Iterator[None]:
        """Move the float32 parameters to other memory for a block, with their present values.

        The flat parameters keep their values, whatever the block writes to the parameters.
        """
        for row, parameters in enumerate(self.rows):
            for k, p in enumerate(parameters):
                if not self.low[k]:
                    p.data = own_storage(self._own_data[row][k].clone())
        try:
            yield
        finally:
            for row, parameters in enumerate(self.rows):
                for k, p in enumerate(parameters):
                    p.data = self._own_data[row][k]

    def publish(self) -> None:
        """Round the master weights to the 16-bit parameters."""
        for k, low in enumerate(self.low):
            if not low:
                continue
            for row, parameters in enumerate(self.rows):
                parameters[k].data.copy_(self.cut(self.full[0][row])[k])

    def check(self) -> bool:
        """Move parameters that have left the flat memory back to it, with their present values.

        A parameter leaves it if a program assigns other memory to ``parameter.data``.

        :return: whether this changed any value in the memory to which a parameter was moved back
        :raises JobError: if a parameter has another type, shape or device than before; if another
            Parameter, or a module without it, is now in its place; or if a parameter was moved and
            a trained parameter shares memory with another one or a buffer
        """
        changed = moved = False
        for row, parameters in enumerate(self.rows):
            self._check_modules(row)
            for k, (p, memory_key) in enumerate(
                zip(parameters, self._memory_keys[row], strict=True)
            ):
                self._check_owner(row, k)
                if _memory_key(p) != memory_key:
                    if not moved:
                        check_separate(self._models[row])
                    moved = True
                    changed |= self._take_back(row, k)
        return changed

    def _take_back(self, row: int, k: int) -> bool:
        """Copy a parameter's new values to the memory that it has left, and move it back there.

        This is the flat memory for a float32 parameter, and separate memory for a 16-bit one.

        :param row: row of the module in the arrays
        :param k: index of the parameter in the layout
        :return: whether the new values differ from the former values in that memory
        :raises JobError: if the parameter has another type, shape or device than before
        """
        p = self.rows[row][k]
        old = self._own_data[row][k]
        if (p.dtype, p.shape, p.device) != (old.dtype, old.shape, old.device):
            raise JobError(changed_message(self.flat.names[k], old, p))
        if _memory_key(old) != self._memory_keys[row][k]:
            # The storage itself was moved, and `old` with it: torch.multiprocessing does this to
            # all tensors that it sends. The row of the flat parameters has a different storage, and
            # has not moved.
            if self.low[k]:
                self._memory_keys[row][k] = _memory_key(old)
            else:
                report_shared(p)
                old = self._own_data[row][k] = own_storage(self.cut(self.full[0][row])[k])
        changed = not torch.equal(p.data, old)
        # A transposed view shares its memory with `old`, which must not change while it is read.
        old.copy_(p.data.clone() if p.data_ptr() == old.data_ptr() else p.data)
        p.data = old
        return changed

    def take_edits(self) -> None:
        """Copy edited elements of 16-bit parameters to their master weights.

        An element was edited if it differs from its rounded master weight. This also detects edits
        through `.data`, which torch's version counters do not count. On a GPU, the host does not
        wait for the comparison.
        """
        for row, parameters in enumerate(self.rows):
            if parameters[0].device.type != "cpu":
                self._take_edits_at_once(row)
                continue
            for p, master, low in zip(parameters, self._master_views(row), self.low, strict=True):
                if low:
                    _take_edit(p.data, master)

    def _take_edits_at_once(self, row: int) -> None:
        """Copy the edits of one module on a GPU by few operations, each for many parameters.

        With one operation per parameter, the host would need longer to start the operations than
        the GPU to execute them.
        """
        masters = self.full[0][row]
        for dtype, group in self._edit_groups():
            if len(group) == 1:  # a single parameter may have more than `COMPARED` elements
                k = group[0]
                _take_edit(self.rows[row][k].data, self._master_views(row)[k])
                continue
            layout = self.local_layout
            begin = layout.offsets[group[0]]
            exact = masters[begin : layout.column_ranges[group[-1]].stop]
            rounded = exact.to(dtype)
            # Padding and float32 parameters lie between the parameters of the group. `written`
            # keeps the rounded values there, so that they compare equal and `exact` stays as it is.
            written = rounded.clone()
            views = [
                written.as_strided(layout.shapes[k], layout.strides[k], layout.offsets[k] - begin)
                for k in group
            ]
            torch._foreach_copy_(views, [self.rows[row][k].data for k in group])
            torch.where(bits(rounded) == bits(written), exact, written, out=exact)

    def _edit_groups(self) -> list[tuple[torch.dtype, list[int]]]:
        """Return groups of successive 16-bit parameters of one type: the type and their indices.

        A group spans at most `COMPARED` elements, or it contains a single, larger parameter.
        """
        groups: list[tuple[torch.dtype, list[int]]] = []
        ranges = self.local_layout.column_ranges
        for k, (p, low) in enumerate(zip(self.rows[0], self.low, strict=True)):
            if not low:
                continue
            dtype, group = groups[-1] if groups else (None, [k])
            if dtype is p.dtype and ranges[k].stop - ranges[group[0]].start <= COMPARED:
                group.append(k)
            else:
                groups.append((p.dtype, [k]))
        return groups

    def _master_views(self, row: int) -> list[torch.Tensor]:
        """Return views of the flat parameters of a local node, one for each of its parameters.

        The view of a 16-bit parameter contains its master weights.

        :param row: index of the local node
        """
        return self.cut(self.full[0][row])

    def differ(self, sent: Sequence[torch.Tensor]) -> bool:
        """Return whether parameters differ in any bit from ``sent``, an earlier value of x.

        A 16-bit parameter that was edited, but not yet copied by :meth:`take_edits`, differs, too.
        On a GPU, the host waits for the comparison.

        :param sent: for each segment, an array of the shape of ``x``
        """
        for x, before in zip(self.x, sent, strict=True):
            for now, then in _blocks(x, before):
                if not torch.equal(bits(now), bits(then)):
                    return True
        return self._rounded_differ()

    def _rounded_differ(self) -> bool:
        """Return whether a 16-bit parameter differs from its rounded master weights in any bit."""
        for row, parameters in enumerate(self.rows):
            for p, master, low in zip(parameters, self._master_views(row), self.low, strict=True):
                if not low:
                    continue
                for now, exact in _blocks(p.data, master):
                    if not torch.equal(bits(exact.to(now.dtype)), bits(now)):
                        return True
        return False

    def newly_trained(self) -> list[str]:
        """Return the names of parameters that were frozen in the layout and are trained now."""
        return [name for name, p in self.frozen.items() if p.requires_grad]

    def newly_frozen(self) -> list[str]:
        """Return the names of parameters that are trained in the layout and are frozen now."""
        pairs = zip(self.flat.names, self.rows[0], strict=True)
        return [name for name, p in pairs if not p.requires_grad]

    def versions(self) -> list[int]:
        """Return torch's version counters of all parameters, which count changes in place."""
        return [p._version for parameters in self.rows for p in parameters]


def _take_edit(low: torch.Tensor, master: torch.Tensor) -> None:
    """Copy elements of a 16-bit parameter to master weights that do not round to them.

    :param low: the parameter
    :param master: its master weights, float32 of the same shape, which are changed in place
    """
    for now, exact in _blocks(low, master):
        written = bits(now)
        rounded = bits(exact.to(now.dtype))
        # Test for equality first on a CPU, which is faster. The host of a GPU would have to wait.
        if now.device.type != "cpu" or not torch.equal(rounded, written):
            torch.where(rounded == written, exact, now, out=exact)


def own_storage(view: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the memory of ``view`` but another storage.

    Libraries that write safetensors take views of one storage for tied weights: Accelerate would
    drop all but one of them from its checkpoints.
    """
    return torch.from_dlpack(view)


def _blocks(
    first: torch.Tensor, second: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pairs of views of the same elements of two tensors of equal shape.

    A view has at most `BLOCK` elements on a CPU, and `COMPARED` elements on a GPU. Temporary
    results then stay in the cache of a CPU, and need little memory on a GPU. Tensors that have
    different strides, or gaps between their elements, are yielded whole.
    """
    size = BLOCK if first.device.type == "cpu" else COMPARED
    same_strides = first.stride() == second.stride() and _fills(first)
    if first.numel() <= size or not same_strides:
        yield first, second
        return
    flat = [tensor.as_strided((tensor.numel(),), (1,)) for tensor in (first, second)]
    yield from zip(flat[0].split(size), flat[1].split(size), strict=True)


def _fills(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill a range of memory without gaps, in any order."""
    order = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    expected = 1
    for stride, length in order:
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def report_shared(parameter: torch.Tensor) -> None:
    """Print a note, once, if a parameter leaves memory that it shared with other processes."""
    if parameter.device.type == "cpu" and parameter.is_shared():
        print_note_once(
            "parameters were in memory that several processes share, as after share_memory(), or "
            "after a model or its state_dict() is sent to another process; they were moved back to "
            "the memory that nodes average, and the other processes keep the present values: send "
            "them the state_dict() again when they need new ones"
        )


def owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the submodule that holds the parameter ``name``, and its name in that submodule."""
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key


def _memory_key(parameter: torch.Tensor) -> tuple:
    """Return address, type, shape and strides of a tensor.

    They show later whether the tensor has other memory, or the same memory in another order, as
    after `parameter.data = parameter.data.t()`.
    """
    return parameter.data_ptr(), parameter.dtype, parameter.shape, parameter.stride()


def replaced_message(name: str) -> str:
    """Return the error message for a parameter that was replaced by another Parameter."""
    return (
        f"parameter {name} has left the memory that nodes average: the module now holds another "
        "Parameter, which the optimizer does not have, as after load_state_dict(assign=True); "
        "load the state without assign, or load it before you make the optimizer"
    )


def replaced_module_message(key: str, before: nn.Module, after: nn.Module) -> str:
    """Return the error message for a submodule that was replaced by one with other parameters.

    :param key: name of the submodule in its parent
    :param before: submodule when the parameters were moved to flat memory
    :param after: submodule that has replaced it
    """
    return (
        f"module {key} was a {type(before).__name__} with parameters that nodes average and is now "
        f"a {type(after).__name__} with other parameters, which the optimizer does not have; "
        "replace the module before you make the optimizer"
    )


def changed_message(name: str, before: torch.Tensor, now: torch.Tensor) -> str:
    """Return the error message for a parameter whose type, shape or device has changed.

    :param name: name of the parameter
    :param before: tensor with the earlier type, shape and device
    :param now: tensor with the present type, shape and device
    """
    old, new = ((f"{tuple(t.shape)} {t.dtype} on {t.device}") for t in (before, now))
    return (
        f"parameter {name} has left the memory that nodes average: it was {old} at the first step "
        f"and is now {new}; convert or move the model before the first step, or undo the change "
        "before the next step"
    )
