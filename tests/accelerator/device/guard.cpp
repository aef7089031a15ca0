// PyTorch's interfaces to a device, and the functions that Python calls through ctypes.
#include "simulated.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

namespace simulated {

namespace {

std::atomic<bool> capturing = false;

// What PyTorch keeps for a torch.Event.
struct Event {
    MarkPtr latest;
};

MarkPtr latest_of(void* event) {
    Locked guard(lock);  // another thread may record it again
    return event ? static_cast<Event*>(event)->latest : nullptr;
}

}  // namespace

struct Guard final : c10::impl::DeviceGuardImplInterface {
    static constexpr c10::DeviceType static_type = c10::DeviceType::PrivateUse1;

    Guard() = default;
    explicit Guard(c10::DeviceType) {}
    c10::DeviceType type() const override { return static_type; }

    c10::Device exchangeDevice(c10::Device device) const override {
        return c10::Device(static_type, exchange_device(index_of(device)));
    }
    c10::Device getDevice() const override { return c10::Device(static_type, current_device()); }
    void setDevice(c10::Device device) const override { exchange_device(index_of(device)); }
    void uncheckedSetDevice(c10::Device device) const noexcept override {
        if (device.has_index()) exchange_device(device.index());
    }
    c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
    void synchronizeDevice(const c10::DeviceIndex device) const override { synchronize(queues_of(device)); }

    c10::Stream getStream(c10::Device device) const override { return current_stream(index_of(device)); }
    c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(index_of(device), 0); }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
    c10::Stream getNewStream(c10::Device device, int) const override { return new_stream(index_of(device)); }
    c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
    bool queryStream(const c10::Stream& stream) const override { return query(queue_of(stream)); }
    void synchronizeStream(const c10::Stream& stream) const override { synchronize({&queue_of(stream)}); }
    bool isStreamCapturing(const c10::Stream&) const override { return capturing; }
    void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
        record_use(data.get(), queue_of(stream));
    }

    void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
        Locked guard(lock);
        if (!*event) *event = new Event;
        static_cast<Event*>(*event)->latest = simulated::record(queue_of(stream));
    }
    void block(void* event, const c10::Stream& stream) const override {
        if (MarkPtr mark = latest_of(event)) wait_for(queue_of(stream), mark);
    }
    bool queryEvent(void* event) const override { return query(latest_of(event)); }
    void synchronizeEvent(void* event) const override { synchronize(latest_of(event)); }
    void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
        delete static_cast<Event*>(event);
    }
    double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0; }  // there is no time here
};

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return kDevices; }
    void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(checked(device)); }
    c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return exchange_device(checked(device)); }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
        return device < 0 ? current_device() : exchange_device(checked(device));
    }
    static c10::DeviceIndex checked(c10::DeviceIndex device) {
        return index_of(c10::Device(c10::DeviceType::PrivateUse1, device));
    }

    bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
    at::Allocator* getPinnedMemoryAllocator() const override { return host_allocator(); }
    c10::Device getDeviceFromPtr(void* address) const override {
        return c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(owner_of(address)));
    }

    // Random numbers are the CPU's, so that a seed gives the bits that it gives there.
    const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
        return at::detail::getDefaultCPUGenerator();
    }
    at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }

    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
        c10::DataPtr fresh = device_allocator()->allocate(nbytes);
        if (const size_t kept = std::min(nbytes, storage.nbytes()))
            device_allocator()->copy_data(fresh.get(), storage.data(), kept);
        auto& changed = const_cast<c10::Storage&>(storage);
        changed.set_data_ptr_noswap(std::move(fresh));
        changed.set_nbytes(nbytes);
    }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

static const bool is_registered = [] {
    c10::SetAllocator(c10::DeviceType::PrivateUse1, device_allocator());
    at::setHostAllocator(c10::DeviceType::PrivateUse1, host_allocator(), 0);
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    return true;
}();

namespace {

// Calls it, and returns what it raised: Python has no other way to learn of an exception through ctypes.
template <class Call>
const char* error_of(Call call) {
    thread_local std::string message;
    try {
        call();
    } catch (const c10::Error& error) {
        message = error.what_without_backtrace();
        return message.c_str();
    } catch (const std::exception& error) {
        message = error.what();
        return message.c_str();
    }
    return nullptr;
}

}  // namespace

}  // namespace simulated

#pragma GCC visibility push(default)  // all else is hidden
extern "C" {

void simulated_schedule(uint64_t seed) { simulated::schedule(seed); }
int64_t simulated_host_waits() { return simulated::host_waits(); }
int64_t simulated_pending() { return simulated::pending(); }
const char* simulated_settle() {
    return simulated::error_of([] { simulated::settle(); });
}
const char* simulated_register(char* address, size_t nbytes) {
    return simulated::error_of([=] { simulated::register_host(address, nbytes); });
}
const char* simulated_unregister(char* address) {
    return simulated::error_of([=] { simulated::unregister_host(address); });
}
int64_t simulated_registered() { return simulated::registrations(); }
void simulated_limit(size_t nbytes) { simulated::set_limit(nbytes); }
int64_t simulated_allocated(int device) { return simulated::allocated(static_cast<c10::DeviceIndex>(device)); }
int64_t simulated_peak(int device) { return simulated::peak(static_cast<c10::DeviceIndex>(device)); }
void simulated_capturing(int on) { simulated::capturing = on != 0; }
int simulated_forked() { return simulated::forked(); }
}
#pragma GCC visibility pop
