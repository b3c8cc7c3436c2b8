"""The table of wrong calls and wrong batches: each with its error and what the message tells.

A row is a call, then its error and the parts of the message, which may stand in any order: where, what was got, what
was expected, and what to do; `=` where the expectation says it. `test_bad_input.py` tests every row, and what goes on
afterwards, and makes `bad_input.md` of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

CALLS = """
prefetch_to_device(source, size=0)
    ValueError: size: | got 0 | an integer of at least 1 | =
prefetch_to_device(source, size=2.5)
    ValueError: size: | got 2.5 | an integer of at least 1 | =
prefetch_to_device(source, size=True)
    ValueError: size: | got True | an integer of at least 1 | =
prefetch_to_device(source, host_size=-1)
    ValueError: host_size: | got -1 | an integer of at least 0 | =
prefetch_to_device(source, batch_axis="rows")
    ValueError: batch_axis: | got 'rows' | an integer of at least 0 | =
prefetch_to_device(source, max_bytes=0)
    ValueError: max_bytes: | got 0 | bytes as a positive integer or text | such as "2GiB"
prefetch_to_device(source, max_bytes="2 apples")
    ValueError: max_bytes: | got '2 apples' | bytes as a positive integer or text | such as "2GiB"
prefetch_to_device(source, max_host_bytes=-5)
    ValueError: max_host_bytes: | got -5 | bytes as a positive integer or text | such as "2GiB"
prefetch_to_device(source, last_batch="skip")
    ValueError: last_batch: | got 'skip' | one of 'error', 'drop', 'pad' | =
prefetch_to_device(source, keep_on_host=7)
    TypeError: keep_on_host: | got int 7 | None, a path (str), a sequence of paths or a function | =
prefetch_to_device(source, fresh_buffers="yes")
    TypeError: fresh_buffers: | got str 'yes' | True, False or None | =
prefetch_to_device(source, delete_used="no")
    TypeError: delete_used: | got str 'no' | True or False | =
prefetch_to_device(source, mask_key=["mask"])
    TypeError: mask_key: | got list ['mask'] | a key of a dict | such as 'mask'
prefetch_to_device(source, on_device="cast")
    TypeError: on_device: | got str 'cast' | a function from batch to batch | =
prefetch_to_device(source, resume="state")
    ValueError: resume: | got 'state' | None or 'replay' | =
prefetch_to_device(source, sharding="data")
    TypeError: sharding: | got str 'data' | None, a Device, a Sharding | pass NamedSharding(mesh, PartitionSpec('data'))
prefetch_to_device(source, sharding=mesh)
    TypeError: sharding: | got Mesh | a Sharding, a PartitionSpec | pass NamedSharding(mesh, PartitionSpec("data"))
prefetch_to_device(source, sharding=P("data"))
    ValueError: sharding= | 'data' | needs a mesh in force | pass NamedSharding(mesh, spec)
with_mesh(source, sharding=P("batch"))
    ValueError: sharding: | 'batch' | axes of the mesh are data | Pass a PartitionSpec of these
prefetch_to_device(source, sharding=NamedSharding(mesh, P(P.UNCONSTRAINED)))
    ValueError: sharding: | UNCONSTRAINED | needs a definite place on each axis | =
prefetch_to_device({"x": rows})
    TypeError: source: | a dict does not give batches | an iterable of batches | a single one goes into a list
prefetch_to_device("data.npz")
    TypeError: source: | a str does not give batches | an iterable of batches | a single one goes into a list
prefetch_to_device(7)
    TypeError: source: | got int 7 | an iterable of batches | =
prefetch_to_device(Reader)
    TypeError: source: | got type | an iterable of batches | Call it, and pass what it returns
prefetch_to_device(Reader(spec=None))
    TypeError: source: | a Reader has read_into, but no element_spec | to say what its batches are | Give it a property
prefetch_to_device(Reader(spec=lambda: spec))
    TypeError: source: | a Reader has read_into, and its element_spec is a method | a value is expected | Give it
DeviceQueue(0)
    ValueError: size: | got 0 | an integer of at least 1 | =
DeviceQueue(2, max_bytes="lots")
    ValueError: max_bytes: | got 'lots' | bytes as a positive integer or text | such as "2GiB"
DeviceQueue(2, sharding=7)
    TypeError: sharding: | got int 7 | None, a Device, a Sharding, a PartitionSpec or a pytree | =
DeviceCache(0, good)
    ValueError: capacity: | got 0 | an integer of at least 1 | =
DeviceCache(12, good, sharding=split)
    ValueError: capacity: | 12 slots | split evenly over 8 devices | Take a multiple of 8
DeviceCache(8, {})
    ValueError: examples: | there are no leaves | a tree with at least one array | =
DeviceCache(8, {"x": 3.0})
    ValueError: examples, leaf x: | got float 3.0 | an array with an axis of rows | =
DeviceCache(8, {"x": rows.astype(object)})
    TypeError: examples, leaf x: | dtype object | cannot go to a device | Leave it out
DeviceCache(8, {"x": rows, "y": jax.ShapeDtypeStruct((), np.int8)})
    TypeError: examples, leaf y: | jax.ShapeDtypeStruct | arrays for all leaves | =
DeviceCache(8, {"x": rows[:7]}, sharding=split)
    ValueError: examples: | got 7 | a positive multiple of 8 rows | =
DeviceCache(8, good)
    ValueError: examples: | 24 examples | the 8 slots of the cache | Pass fewer, or make it with a larger capacity
DeviceCache(24, good, max_bytes=8)
    ValueError: capacity: | take 96 bytes | max_bytes is 8 | Raise max_bytes, or take a smaller capacity
DeviceCache(24, good, sharding={"x": split, "y": split})
    ValueError: examples: sharding is not a prefix: | got x: y is missing | expected x, y | pass one sharding
batched(source, 0)
    ValueError: batch_size: | got 0 | an integer of at least 1 | =
batched(source, 4, drop_last="yes")
    TypeError: drop_last: | got str 'yes' | True or False | =
batched({"x": 1}, 4)
    TypeError: samples: | got dict {'x': 1} | an iterable of samples | Zip columns to samples
batched(lambda: [good], 4)
    TypeError: samples: | got function | an iterable of samples | Call it, and pass what it returns
batched(4, [good] * 9)
    ValueError: batch_size: | got list [{'x': array([ | an integer of at least 1 | =
batched(Reader(spec), 4)
    TypeError: samples: | got Reader | an iterable of samples | pass it to prefetch_to_device as it is
fetch_to_host(7)
    TypeError: outputs: | got int 7 | an iterable of pytrees | =
fetch_to_host(good)
    TypeError: outputs: | got dict, which is one of them | an iterable of pytrees | a single one goes into a list
fetch_to_host(rows)
    TypeError: outputs: | got ndarray, which is one of them | an iterable of pytrees | a single one goes into a list
fetch_to_host(jax.numpy.zeros(3))
    TypeError: outputs: | got ArrayImpl, which is one of them | an iterable of pytrees | a single one goes into a list
fetch_to_host([], size=0)
    ValueError: size: | got 0 | an integer of at least 1 | =
fetch_to_host([], max_bytes=-1)
    ValueError: max_bytes: | got -1 | bytes as a positive integer or text | such as "2GiB"
train_loop(7, 0, source, num_steps=2)
    TypeError: step: | got int 7 | a function (state, batch) -> (state, metrics) | =
train_loop(step, 0, source, num_steps=1.5)
    ValueError: num_steps: | got 1.5 | an integer of at least 0 | =
train_loop(step, 0, source, num_steps=2, log_every_steps=0)
    ValueError: log_every_steps: | got 0 | an integer of at least 1 | =
train_loop(step, 0, source, num_steps=2, hooks=7)
    TypeError: hooks: | got int 7 | functions (step, metrics) | =
train_loop(step, 0, source, num_steps=2, hooks=[print, lambda metrics: None])
    TypeError: hooks: | got <lambda>(metrics) | functions (step, metrics) | cannot be called with 2 arguments
train_loop(step, 0, source, num_steps=2, eval_fn=7)
    TypeError: eval_fn: | got int 7 | a function from state to metrics | =
train_loop(step, 0, source, num_steps=2, eval_every_steps=2)
    TypeError: eval_every_steps: | got 2 alone | expected eval_fn beside it | Pass eval_fn, or leave it out
train_loop(step, 0, source, num_steps=2, save_every_seconds="60", checkpoints=folder)
    TypeError: save_every_seconds: | got str '60' | expected seconds | =
train_loop(step, 0, source, num_steps=2, checkpoints=7)
    TypeError: checkpoints: | int 7 | Checkpoints or a path | =
train_loop(step, 0, source, num_steps=2, checkpoints=folder)
    TypeError: source: | a CountedSource | cannot be resumed | pass resume="replay"
train_loop(step, 0, source, num_steps=2, stop_on_non_finite=3)
    TypeError: stop_on_non_finite: | got 3 | the name of a metric | =
train_loop(step, 0, prefetch_to_device(source), num_steps=2, size=3)
    TypeError: size: | a DevicePrefetcher | made with its own | Leave them out here, or pass the bare source
evaluate(7, 0, source)
    TypeError: step: | got int 7 | a function (state, batch) -> metrics | =
evaluate(step, 0, [])
    ValueError: evaluate: | no rows | One-shot sources serve one evaluation | pass an iterable
Checkpoints(7)
    TypeError: directory: | got int 7 | a path | =
Checkpoints(folder, max_to_keep=0)
    ValueError: max_to_keep: | got 0 | an integer of at least 1 | =
Checkpoints(folder, best_metric=3)
    TypeError: best_metric: | got 3 | the name of a metric or None | =
Checkpoints(folder, best_metric="loss", best_mode="largest")
    ValueError: best_mode: | got 'largest' | 'max' or 'min' | =
"""

BATCHES = """
after_two({"x": object()})
    TypeError: Batch 2, leaf x: | object | cannot go to a device | prefetch_to_device(..., keep_on_host=...)
after_two({"x": "text"})
    TypeError: Batch 2, leaf x: | str | cannot go to a device | prefetch_to_device(..., keep_on_host=...)
after_two({"x": rows.astype(str)})
    TypeError: Batch 2, leaf x: | dtype <U | cannot go to a device | prefetch_to_device(..., keep_on_host=...)
after_two({"x": rows.astype(object)})
    TypeError: Batch 2, leaf x: | dtype object | cannot go to a device | else leave it out
after_two({"x": rows.astype("M8[s]")})
    TypeError: Batch 2, leaf x: | datetime64[s] | cannot go to a device | prefetch_to_device(..., keep_on_host=...)
after_two({"x": np.zeros(24, [("a", "i4")])})
    TypeError: Batch 2, leaf x: | [('a', '<i4')] | cannot go to a device | prefetch_to_device(..., keep_on_host=...)
after_two({"x": np.ma.masked_array(rows)})
    TypeError: Batch 2, leaf x: | masked arrays | no place on a device | Pass leaf.filled(value) and the mask
after_two({"x": {"ids": np.array([2**40])}})
    OverflowError: Batch 2, leaf x/ids: | 1099511627776 | does not fit int32 | Set jax_enable_x64
after_two({"x": 2**70})
    OverflowError: Batch 2, leaf x: | 1180591620717411303424 | does not fit int32 | map the values to a smaller range
after_two({"x": deleted})
    ValueError: Batch 2, leaf x: | deleted or donated | Yield arrays that are alive | each once
after_two({"x": rows[:7]}, sharding=split)
    ValueError: Batch 2, leaf x: axis 0 | has 7 rows | need a multiple of 8 | prefetch_to_device(..., last_batch='pad')
after_two({"x": np.zeros(32, np.float32)}, last_batch="pad")
    ValueError: Batch 2: | 32 rows | batch 0 has 24 | split larger ones
after_two({"x": rows[:8]}, last_batch="drop")
    ValueError: Batch 2: | 8 rows | batch 0 has 24 | Let the source batch evenly, or pass last_batch='pad'
after_two(good | {"mask": rows}, last_batch="pad")
    ValueError: Batch 2: | has that key already | adds the mask as 'mask' | Pass another mask_key
first(good, keep_on_host="z")
    ValueError: Batch 0: | names 'z' | Leaves: x | no leaf is called so
first(good, max_bytes=8)
    ValueError: Batch 0 | needs 96 bytes | max_bytes is 8 | raise max_bytes
first(good, max_bytes=99, on_device=lambda batch: [batch["x"]] * 2)
    ValueError: Batch 0 | needs 288 bytes | (192 of them are for what on_device makes) | raise max_bytes
first(good, on_device=lambda batch: None)
    TypeError: batch 0 | on_device: returned None | expected the batch that the loop gets | Let it return that
first(good, sharding={"y": None})
    ValueError: Batch 0: sharding is not a prefix: | got x: y is missing, x is too many | expected y | Yield the keys
first(good, sharding=jax.devices())
    ValueError: Batch 0: | sharding is a list of 8 devices | one for each part | pass NamedSharding(mesh, PartitionSpec
first((rows, rows), sharding=[split, split])
    ValueError: Batch 0: sharding is not a prefix: | it is a list | the batch a tuple | Pass a tuple
first(good, mask_key=3, last_batch="pad")
    ValueError: Batch 0: | adds the mask as 3 | sorted among the batch's keys 'x' | Pass a mask_key of their type
source_of([good])
    TypeError: source: | a Passes returned a list | expected an iterator of batches | Return iter(...) of it
source_of(Reader(spec=None))
    TypeError: source: | a Reader has read_into, but no element_spec | to say what its batches are | Give it a property
source_of("itself")
    TypeError: source: | a Passes returns the object itself | would be spent after a pass | or leave __iter__ out
writes(spec, 25)
    ValueError: Batch 0: read_into | returned 25 rows | element_spec has 24 | Return how many it has written
writes(spec, -1)
    ValueError: Batch 0: read_into | returned -1 rows | element_spec has 24 | Return how many it has written
writes(spec, "24")
    TypeError: Batch 0: read_into | returned '24' | no number of rows | Return how many it has written
writes({"x": (24,)}, 24)
    TypeError: Batch 0, leaf x/0: | element_spec has 24 there | a shape and a dtype for each leaf | such as jax.Shape
writes({"x": jax.ShapeDtypeStruct((), np.float32)}, 1)
    ValueError: Batch 0: element_spec | no leaf with an axis of rows | Describe whole batches | =
stacks([{"a": rows}, {"b": rows}])
    ValueError: Batch 0, sample 1: | got b: a is missing, b is too many | expected a | Give all samples of a batch the
stacks([{"a": rows}, {"a": None}])
    ValueError: Batch 0, sample 1: | got none: a is missing | expected a | None, which counts as missing, at a
stacks([{}, {}])
    ValueError: Batch 0, sample 0: | it has no leaf | Yield samples of arrays or numbers | =
stacks([{"a": rows}, {"a": rows[:3]}])
    ValueError: Batch 0, sample 1, leaf a: | shape is (3,) | sample 0 has (24,) | crop or pad them
stacks([{"a": rows}, {"a": rows.astype(np.int8)}])
    ValueError: Batch 0, sample 1, leaf a: | dtype is int8 | sample 0 has float32 | Convert it where samples are made
stacks([{"a": "text"}, {"a": "more"}])
    TypeError: Batch 0, sample 0, leaf a: | str | an array of numbers | Leave it out of the samples
fetches([jax.numpy.zeros(3), jax.numpy.zeros(3), jax.random.key(0)])
    TypeError: Result 2, leaf batch: | a typed PRNG key | no host form | Yield jax.random.key_data(key)
fetches([jax.numpy.zeros(3), jax.numpy.zeros(3), deleted])
    ValueError: Result 2, leaf batch: | deleted or donated | Yield outputs before a step that donates them | =
"""

OBJECTS = """
queue.put({"x": object()})
    TypeError: Batch 0, leaf x: | object | cannot go to a device | Leave it out
queue.put({"x": rows}) or queue.put({"x": rows[:8]})
    ValueError: Batch 1: leaf x | is float32[8] | was float32[24] | pad them, or make another queue
queue.put(good) or queue.clear() or queue.put({"y": rows})
    ValueError: Batch 0: | x is missing, y is too many | the first batch ever put | put only batches like it
queue.put(good, timeout="1")
    TypeError: timeout: | got str '1' | expected seconds | =
queue.put(good, timeout=-1)
    ValueError: timeout: | got -1 | at least 0 seconds | =
queue.get(timeout=0)
    queue.Empty: get: | no batch came | within 0 s | =
queue.get(timeout=float("nan"))
    ValueError: timeout: | got nan | at least 0 seconds | =
cache.take([99])
    IndexError: take: row 0 | names slot 99 | there are slots 0 to 23 | =
cache.take([0.5])
    ValueError: take: | got float64 of shape (1,) | integers of shape (rows,) | =
cache.take([[0]])
    ValueError: take: | of shape (1, 1) | integers of shape (rows,) | =
cache.insert({"z": rows})
    ValueError: insert: | got z: x is missing, z is too many | expected x | Pass a tree with the same keys
cache.insert({"x": np.zeros((3, 2), np.float32)})
    ValueError: insert, leaf x: | got (3, 2) | an array of shape (rows,) | =
cache.insert({"x": np.zeros(3, np.int32)})
    ValueError: insert, leaf x: | got int32 | expected float32 | Convert it with .astype('float32')
cache.insert({"x": rows[:3]}, slots=[0, 0, 1])
    ValueError: insert: | got 2 | 3 different slots | one for each row
cache.batches(4, 7)
    TypeError: key: | got 7 | one key | such as jax.random.key(0)
cache.batches(4, key, epochs=2)
    ValueError: epochs: | drawing with replacement has no epochs | Pass replace=False | =
cache.batches(4, key, replace="no")
    TypeError: replace: | got str 'no' | True or False | =
cache.refresh(7)
    TypeError: source: | got int 7 | an iterable of batches | =
cache.refresh(source, every_takes=0)
    ValueError: every_takes: | got 0 | an integer of at least 1 | =
cache.set_state({"takes": 3})
    ValueError: set_state: | got {'takes': 3} | a dict of takes, refreshes, filled, examples | Take another state
cache.set_state(cache.get_state() | {"takes": "3"})
    ValueError: set_state: takes: | got str '3' | an integer from 0 | take an earlier one
cache.set_state(cache.get_state() | {"filled": 99})
    ValueError: state: | 99 of each device filled | a cache of 24 slots | Make the cache as it was made then
cache.batches(4, key).set_state({"taken": 1})
    ValueError: state: | got {'taken': 1} | what get_state() of cache batches returned | Take another state
batches.set_state(None)
    ValueError: set_state: | got None | what get_state() of version 1 gave | Begin anew
batches.set_state({"version": 1})
    ValueError: set_state: | got {'version': 1} | a dict of pass, taken, version, how, rows, source | Take another state
batches.set_state(batches.get_state() | {"extra": 1})
    ValueError: set_state: | 'extra': 1 | a dict of pass, taken, version, how, rows, source | Take another state
batches.set_state(batches.get_state() | {"pass": -1})
    ValueError: set_state: pass: | got int -1 | an integer from 0 | take an earlier one
batches.set_state(batches.get_state() | {"taken": "2"})
    ValueError: set_state: taken: | got str '2' | an integer from 0 | take an earlier one
batches.set_state(batches.get_state() | {"taken": 10**30})
    ValueError: set_state: taken: | got int 10000 | an integer from 0 to 9223372036854775807 | take an earlier one
batches.set_state(batches.get_state() | {"rows": 1.5})
    ValueError: set_state: rows: | got float 1.5 | an integer from 0 | take an earlier one
batches.set_state(batches.get_state() | {"how": "state_dict"})
    ValueError: set_state: | 'state_dict' | 'replay' | Make it as it was made then
checkpoints.save(-1, good)
    ValueError: step: | got -1 | an integer of at least 0 | =
checkpoints.restore(good, step=3)
    FileNotFoundError: 3 | not found | checkpoint 3 was read | pass another step
"""


@dataclass(frozen=True)
class Row:
    """One of them."""

    call: str
    error: str
    where: str
    got: str
    expected: str
    cure: str

    @property
    def parts(self) -> tuple[str, ...]:
        """What the message, or a note beside it, has in it."""
        return tuple(part for part in (self.where, self.got, self.expected, self.cure) if part != "=")


def rows_of(table: str) -> list[Row]:
    """The rows of one of the tables above."""
    made = re.findall(r"^(\S.*)\n    ([\w.]+): (.+)$", table, re.MULTILINE)
    assert 2 * len(made) == len(table.strip().splitlines())
    return [Row(call, error, *message.split(" | ")) for call, error, message in made]
