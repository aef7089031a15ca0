// What Python sees of the ends of edges that need no Python: it makes them, and closes them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>

#include <optional>

#include "async_ends.h"
#include "memory.h"
#include "post_queue.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tw {
namespace {

Ring ring_of(const std::tuple<u64, u64, u64, u64>& numbers) {
    const auto [first, stride, nbytes, count] = numbers;
    if (!count || nbytes < sizeof(SlotHeader) || stride < nbytes || stride > largest || count > largest / std::max<u64>(stride, 1)) throw nb::value_error("no such ring of slots");
    return {first, stride, nbytes, count};
}

void check_ring(const Memory& memory, const Ring& ring) { check(memory, ring.first, ring.stride * (ring.count - 1) + ring.nbytes); }

}  // namespace

void bind_async_ends(nb::module_& m) {
    using Numbers = std::tuple<u64, u64, u64, u64>;
    nb::class_<Watcher>(m, "Watcher", "A thread that looks at the words of one region for others.")
        .def(nb::new_([](const Memory& words, bool naps) { return std::make_shared<Watcher>(words.span, naps); }), "words"_a, "naps"_a = false)
        .def("close", &Watcher::close, nb::call_guard<Unlocked>(), "Whatever waits for a word is told that it is lost.");
    nb::class_<PostQueue>(m, "PostQueue", "Writes of such ends that Python is to post.")
        .def(nb::new_([] { return std::make_shared<PostQueue>(); }))
        .def("next", [](PostQueue& queue, double seconds) -> std::optional<std::tuple<u64, u64, u64>> {
                 Post post;
                 bool found;
                 {
                     Unlocked unlocked;
                     found = queue.pop(seconds, post);
                 }
                 if (!found) return std::nullopt;
                 return std::make_tuple(post.number, post.step, post.nbytes);
             }, "seconds"_a, "Whose it is, the step, and how many bytes of its slot go with the signal; None: none came in time.")
        .def("close", &PostQueue::close, nb::call_guard<Unlocked>(), "`next` returns at once, when it has returned what waits.");
    nb::class_<AsyncProducer>(m, "AsyncProducer", "The sending end of an edge, for programs in C++.")
        .def_static("mapped", [](std::shared_ptr<Watcher> watcher, u64 credit, std::shared_ptr<Liveness> peer, double seconds, const Memory& slots, Numbers ring, const Memory& words, u64 arrival, const Memory* lends) {
                 check_ring(slots, ring_of(ring)); check_writable(slots);
                 word(words, arrival); check_writable(words);
                 return std::make_shared<AsyncProducer>(AsyncEnd(std::move(watcher), credit, std::move(peer), seconds), mapped_carrier(slots.span, ring_of(ring), words.span, arrival), ring_of(ring), lends ? lends->span : nullptr);
             }, "watcher"_a, "credit"_a, "peer"_a, "seconds"_a, "slots"_a, "ring"_a, "words"_a, "arrival"_a, "lends"_a.none() = nb::none())
        .def_static("posted", [](std::shared_ptr<Watcher> watcher, u64 credit, std::shared_ptr<Liveness> peer, double seconds, std::shared_ptr<Connection> connection, const Memory& source, Numbers ours, u64 key, Numbers theirs, u64 words_key, u64 arrival) {
                 check_ring(source, ring_of(ours));
                 return std::make_shared<AsyncProducer>(AsyncEnd(std::move(watcher), credit, std::move(peer), seconds),
                                                        posted_carrier(std::move(connection), source.span, ring_of(ours), {key, ring_of(theirs), words_key, arrival}), ring_of(ours), nullptr);
             }, "watcher"_a, "credit"_a, "peer"_a, "seconds"_a, "connection"_a, "source"_a, "ours"_a, "key"_a, "theirs"_a, "words_key"_a, "arrival"_a)
        .def_static("queued", [](std::shared_ptr<Watcher> watcher, u64 credit, std::shared_ptr<Liveness> peer, double seconds, std::shared_ptr<PostQueue> queue, u64 number, const Memory& source, Numbers ours) {
                 check_ring(source, ring_of(ours));
                 return std::make_shared<AsyncProducer>(AsyncEnd(std::move(watcher), credit, std::move(peer), seconds), queued_carrier(std::move(queue), number, source.span, ring_of(ours)), ring_of(ours), nullptr);
             }, "watcher"_a, "credit"_a, "peer"_a, "seconds"_a, "queue"_a, "number"_a, "source"_a, "ours"_a)
        .def_prop_ro("address", [](AsyncProducer& p) { return reinterpret_cast<uintptr_t>(&p); });
    nb::class_<AsyncConsumer>(m, "AsyncConsumer", "The receiving end of an edge, for programs in C++.")
        .def_static("mapped", [](std::shared_ptr<Watcher> watcher, u64 arrival, std::shared_ptr<Liveness> peer, double seconds, const Memory& memory, Numbers ring, const Memory& words, u64 credit, const Memory* lent) {
                 check_ring(memory, ring_of(ring));
                 word(words, credit); check_writable(words);
                 return std::make_shared<AsyncConsumer>(AsyncEnd(std::move(watcher), arrival, std::move(peer), seconds), memory.span, ring_of(ring), mapped_announcement(words.span, credit), lent ? lent->span : nullptr);
             }, "watcher"_a, "arrival"_a, "peer"_a, "seconds"_a, "memory"_a, "ring"_a, "words"_a, "credit"_a, "lent"_a.none() = nb::none())
        .def_static("posted", [](std::shared_ptr<Watcher> watcher, u64 arrival, std::shared_ptr<Liveness> peer, double seconds, const Memory& memory, Numbers ring, std::shared_ptr<Connection> connection, u64 words_key, u64 credit) {
                 check_ring(memory, ring_of(ring));
                 return std::make_shared<AsyncConsumer>(AsyncEnd(std::move(watcher), arrival, std::move(peer), seconds), memory.span, ring_of(ring), posted_announcement(std::move(connection), words_key, credit), nullptr);
             }, "watcher"_a, "arrival"_a, "peer"_a, "seconds"_a, "memory"_a, "ring"_a, "connection"_a, "words_key"_a, "credit"_a)
        .def_static("queued", [](std::shared_ptr<Watcher> watcher, u64 arrival, std::shared_ptr<Liveness> peer, double seconds, const Memory& memory, Numbers ring, std::shared_ptr<PostQueue> queue, u64 number) {
                 check_ring(memory, ring_of(ring));
                 return std::make_shared<AsyncConsumer>(AsyncEnd(std::move(watcher), arrival, std::move(peer), seconds), memory.span, ring_of(ring), queued_announcement(std::move(queue), number), nullptr);
             }, "watcher"_a, "arrival"_a, "peer"_a, "seconds"_a, "memory"_a, "ring"_a, "queue"_a, "number"_a)
        .def_prop_ro("address", [](AsyncConsumer& c) { return reinterpret_cast<uintptr_t>(&c); });
    m.attr("SLOT_HEADER") = sizeof(SlotHeader);
    m.def("async_edges", [] { return reinterpret_cast<uintptr_t>(&async_edges()); }, "The address of the functions that tensorwire/async_edges.h describes.");
}

}  // namespace tw
