/* Events: a ring in the state file, and sets that each read it from their own place.
 *
 * Every set gets each event it registered for, once and in order, whoever else listens. A wait
 * looks every few milliseconds rather than sleeping on a futex, because authors of events are other
 * processes and may be written in Python. Not more often: an idle agent waits all day.
 */
#include "core.h"

#include <stdlib.h>

enum { SET_MAGIC = 0x56534554, LOOK_EVERY_NS = 10000000 };

struct event_set {
    uint32_t magic;
    struct sim_node *node;
    uint64_t next; /* sequence number of the first event not yet looked at */
    uint64_t types[SIM_GPUS];
};

struct event_data {
    void *device;
    unsigned long long type, payload;
    unsigned gpu_instance, compute_instance;
};

NUMBER(nvmlDeviceGetSupportedEventTypes, ANY_DEVICE, unsigned long long, true,
       call.device->event_types)

NVML_API nvmlReturn_t nvmlEventSetCreate(struct event_set **set)
{
    ENTER(NULL, NO_HANDLE, set != NULL);
    struct event_set *made = calloc(1, sizeof *made);
    if (made == NULL) LEAVE(NVML_ERROR_MEMORY);
    made->magic = SET_MAGIC;
    made->node = call.node;
    made->next = __atomic_load_n(&call.node->event_head, __ATOMIC_ACQUIRE);
    *set = made;
    LEAVE(NVML_SUCCESS);
}

NVML_API nvmlReturn_t nvmlEventSetFree(struct event_set *set)
{
    ENTER(NULL, NO_HANDLE, set != NULL && set->magic == SET_MAGIC);
    set->magic = 0;
    free(set);
    LEAVE(NVML_SUCCESS);
}

NVML_API nvmlReturn_t nvmlDeviceRegisterEvents(void *handle, unsigned long long types,
                                               struct event_set *set)
{
    ENTER(handle, GPU, set != NULL && set->magic == SET_MAGIC);
    if ((types & ~call.device->event_types) != 0) LEAVE(NVML_ERROR_NOT_SUPPORTED);
    set->types[call.gpu] |= types;
    LEAVE(NVML_SUCCESS);
}

/* Copies event number `sequence`; false when newer ones overwrote it meanwhile. */
static bool read_event(const struct sim_node *node, uint64_t sequence, struct sim_event *event)
{
    const struct sim_event *row = &node->events[sequence % SIM_EVENTS];
    *event = *row;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return event->sequence == sequence &&
        __atomic_load_n(&node->event_head, __ATOMIC_ACQUIRE) - sequence <= SIM_EVENTS;
}

static bool next_event(struct event_set *set, struct sim_event *event)
{
    uint64_t head = __atomic_load_n(&set->node->event_head, __ATOMIC_ACQUIRE);
    /* a driver's queue overflows too */
    if (head - set->next > SIM_EVENTS) set->next = head - SIM_EVENTS;
    while (set->next < head) {
        bool whole = read_event(set->node, set->next++, event);
        if (whole && event->gpu < SIM_GPUS && (set->types[event->gpu] & event->type) != 0)
            return true;
    }
    return false;
}

static nvmlReturn_t wait(const char *function, struct event_set *set, struct event_data *out,
                         unsigned timeout_ms, bool with_instances)
{
    uint64_t deadline = sim_monotonic_ns() + (uint64_t)timeout_ms * 1000000ull;
    struct sim_call call;
    nvmlReturn_t refused = sim_begin(&call, function, NULL, NO_HANDLE,
                                     set != NULL && set->magic == SET_MAGIC && out != NULL);
    if (refused != NVML_SUCCESS) return sim_end(&call, refused);
    struct sim_event event;
    while (!next_event(set, &event)) {
        uint64_t now = sim_monotonic_ns();
        if (now >= deadline) return sim_end(&call, NVML_ERROR_TIMEOUT);
        if (!sim_initialized()) return sim_end(&call, NVML_ERROR_UNINITIALIZED);
        sim_sleep_ns(deadline - now < LOOK_EVERY_NS ? deadline - now : LOOK_EVERY_NS);
    }
    call.gpu = event.gpu;
    *out = (struct event_data){
        .device = sim_gpu_handle(event.gpu),
        .type = event.type,
        .payload = event.payload,
        .gpu_instance = with_instances ? event.gpu_instance : SIM_NONE,
        .compute_instance = with_instances ? event.compute_instance : SIM_NONE,
    };
    return sim_end(&call, NVML_SUCCESS);
}

NVML_API nvmlReturn_t nvmlEventSetWait(struct event_set *set, struct event_data *event,
                                       unsigned timeout_ms)
{
    return wait(__func__, set, event, timeout_ms, false);
}

NVML_API nvmlReturn_t nvmlEventSetWait_v2(struct event_set *set, struct event_data *event,
                                          unsigned timeout_ms)
{
    return wait(__func__, set, event, timeout_ms, true);
}
