// What Python sees of edges: their header, and the ends that need no Python, which it makes and closes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>

#include "async_ends.h"
#include "memory.h"
#include "post_queue.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tw {
namespace {

// ---- the header

// Copies a header out of a buffer, or into it.
class Place {
  public:
    Place(nb::handle slot, u64 at, int flags) {
        if (PyObject_GetBuffer(slot.ptr(), &view_, flags) != 0) throw nb::python_error();
        if (at <= static_cast<u64>(view_.len) && static_cast<u64>(view_.len) - at >= sizeof(EdgeHeader)) {
            data = static_cast<char*>(view_.buf) + at;
            return;
        }
        PyBuffer_Release(&view_);
        throw nb::value_error("a slot of an edge begins with a header of 256 bytes; this one is shorter");
    }
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;
    ~Place() { PyBuffer_Release(&view_); }
    char* data;

  private:
    Py_buffer view_;
};

template <size_t n>
void put(void* field, const nb::bytes& bytes) {
    if (bytes.size() != n) throw nb::value_error("a field of a header has another size");
    std::memcpy(field, bytes.data(), n);
}

void pack_header(nb::handle slot, u64 at, u8 kind, const nb::bytes& type, u64 step, u64 nbytes, u64 offset, const nb::bytes& value, const nb::bytes& region, const nb::bytes& shape) {
    EdgeHeader header{};
    mark(header);
    header.kind = kind;
    put<2>(&header.dtype, type);
    header.step = step;
    header.nbytes = nbytes;
    header.offset = offset;
    put<8>(&header.value, value);
    put<32>(header.region, region);
    put<128>(header.lengths, shape);
    std::memcpy(Place(slot, at, PyBUF_WRITABLE).data, &header, sizeof header);
}

using Fields = std::tuple<u8, nb::bytes, u64, u64, u64, nb::bytes, nb::bytes, nb::bytes>;
Fields unpack_header(nb::handle slot, u64 at, u64 bound, u64 memory) {
    EdgeHeader header;
    std::memcpy(&header, Place(slot, at, PyBUF_SIMPLE).data, sizeof header);
    const std::string why = refusal(header, bound, memory);
    if (!why.empty()) throw nb::value_error(why.c_str());
    return {header.kind, nb::bytes(&header.dtype, 2), header.step, header.nbytes, header.offset, nb::bytes(&header.value, 8),
            nb::bytes(header.region, sizeof header.region), nb::bytes(header.lengths, 128)};
}

u64 step_of(nb::handle slot, u64 at) {
    u64 step;
    std::memcpy(&step, Place(slot, at, PyBUF_SIMPLE).data + offsetof(EdgeHeader, step), sizeof step);
    return step;
}

// ---- ends that need no Python

using Numbers = std::pair<u64, u64>;                                  // bytes of a slot, and how many there are
using LentMemory = std::optional<std::pair<const Memory*, nb::bytes>>;  // and its region, packed
using AwaitedOf = std::tuple<std::shared_ptr<Watcher>, u64, std::shared_ptr<Liveness>, double>;

Ring ring_of(const Numbers& numbers) {
    const auto [nbytes, count] = numbers;
    if (!count || nbytes < sizeof(EdgeHeader) || nbytes > largest || count > largest / nbytes) throw nb::value_error("no such ring of slots");
    return {nbytes, count};
}

std::shared_ptr<Span> slots_of(const Memory* memory, const Numbers& numbers) {
    if (!memory) return nullptr;
    const Ring ring = ring_of(numbers);
    check(*memory, 0, ring.stride() * (ring.count - 1) + ring.nbytes);
    return memory->span;
}

Lent lent_of(const LentMemory& given) {
    Lent lent;
    if (!given) return lent;
    lent.memory = given->first->span;
    put<sizeof lent.region>(lent.region, given->second);
    return lent;
}

Awaited awaited_of(const AwaitedOf& given) {
    const auto& [watcher, word, peer, seconds] = given;
    return {watcher, word, peer, seconds};
}

// A path until an end has taken it.
struct AsyncPath {
    std::unique_ptr<Path> path;
    std::unique_ptr<Path> take() {
        if (!path) throw nb::value_error("an end has this path already");
        return std::move(path);
    }
};

}  // namespace

void bind_edges(nb::module_& m) {
    m.def("dtypes", [] {
        std::vector<std::pair<std::string, u64>> all;
        for (const Dtype& each : dtypes) all.emplace_back(each.name, each.nbytes);
        return all;
    }, "Name and bytes of each dtype of a header, by its number.");
    m.attr("HEADER") = sizeof(EdgeHeader);
    m.def("pack_header", &pack_header, "slot"_a, "at"_a, "kind"_a, "type"_a, "step"_a, "nbytes"_a, "offset"_a, "value"_a, "region"_a, "shape"_a,
          "Writes a header at `slot[at:]`. `type`: dtype and rank; `shape`: lengths and strides.");
    m.def("unpack_header", &unpack_header, "slot"_a, "at"_a, "bound"_a, "memory"_a,
          "The fields of the header at `slot[at:]`, kind to shape, once they are checked. Raises ValueError.");
    m.def("step_of", &step_of, "slot"_a, "at"_a, "The step of the header at `slot[at:]`, unchecked: whether it is worth reading.");

    nb::class_<Watcher>(m, "Watcher", "A thread that looks at the words of one region for others.")
        .def(nb::new_([](const Memory& words, bool naps) { return std::make_shared<Watcher>(words.span, naps); }), "words"_a, "naps"_a = false)
        .def("close", &Watcher::close, nb::call_guard<Unlocked>(), "Whatever waits for a word is told that it is lost.");
    nb::class_<PostQueue>(m, "PostQueue", "Writes of such ends that Python is to post.")
        .def(nb::new_([] { return std::make_shared<PostQueue>(); }))
        .def("next", [](PostQueue& queue, double seconds) -> std::optional<std::tuple<u64, u64, u64, u64>> {
                 Post post;
                 bool found;
                 {
                     Unlocked unlocked;
                     found = queue.pop(seconds, post);
                 }
                 if (!found) return std::nullopt;
                 return std::make_tuple(post.whose, post.value, post.at, post.nbytes);
             }, "seconds"_a, "Whose it is, the signal, and where in the slots how many bytes lie that go with it; None: none came in time.")
        .def("close", &PostQueue::close, nb::call_guard<Unlocked>(), "`next` returns at once, when it has returned what waits.");
    nb::class_<AsyncPath>(m, "AsyncPath", "How an end's words, and a producer's slots, get to the other end.")
        .def_static("mapped", [](const Memory& words, u64 offset, const Memory* slots, Numbers ring) {
                 word(words, offset); check_writable(words);
                 if (slots) check_writable(*slots);
                 return AsyncPath{mapped_path(words.span, offset, slots_of(slots, ring), {ring.first, ring.second})};
             }, "words"_a, "word"_a, "slots"_a.none() = nb::none(), "ring"_a = Numbers(0, 1))
        .def_static("posted", [](std::shared_ptr<Connection> connection, u64 words_key, u64 offset, const Memory* slots, Numbers ring, u64 key) {
                 return AsyncPath{posted_path(std::move(connection), words_key, offset, slots_of(slots, ring), {ring.first, ring.second}, key)};
             }, "connection"_a, "words_key"_a, "word"_a, "slots"_a.none() = nb::none(), "ring"_a = Numbers(0, 1), "key"_a = 0)
        .def_static("queued", [](std::shared_ptr<PostQueue> queue, u64 whose, const Memory* slots, Numbers ring) {
                 return AsyncPath{queued_path(std::move(queue), whose, slots_of(slots, ring), {ring.first, ring.second})};
             }, "queue"_a, "whose"_a, "slots"_a.none() = nb::none(), "ring"_a = Numbers(0, 1));
    nb::class_<AsyncProducer>(m, "AsyncProducer", "The sending end of an edge, for programs in C++.")
        .def(nb::new_([](AwaitedOf awaited, AsyncPath& path, Numbers ring, LentMemory lends) {
                 return std::make_shared<AsyncProducer>(awaited_of(awaited), path.take(), ring_of(ring), lent_of(lends));
             }), "awaited"_a, "path"_a, "ring"_a, "lends"_a.none(), "`awaited`: the watcher, where its word is, the peer, and seconds.")
        .def_prop_ro("address", [](AsyncProducer& p) { return reinterpret_cast<uintptr_t>(&p); });
    nb::class_<AsyncConsumer>(m, "AsyncConsumer", "The receiving end of an edge, for programs in C++.")
        .def(nb::new_([](AwaitedOf awaited, AsyncPath& path, Numbers ring, const Memory& slots, LentMemory lent) {
                 return std::make_shared<AsyncConsumer>(awaited_of(awaited), slots_of(&slots, ring), ring_of(ring), path.take(), lent_of(lent));
             }), "awaited"_a, "path"_a, "ring"_a, "slots"_a, "lent"_a.none())
        .def_prop_ro("address", [](AsyncConsumer& c) { return reinterpret_cast<uintptr_t>(&c); });
    m.def("async_edges", [] { return reinterpret_cast<uintptr_t>(&async_edges()); }, "The address of the functions that tensorwire/async_edges.h describes.");
}

}  // namespace tw
