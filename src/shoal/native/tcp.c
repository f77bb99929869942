/* Sending and receiving over several TCP connections at once, by the calling thread alone. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <sys/socket.h>

/* What is left to do on one connection; comm/tcp.py has the same fields. */
typedef struct {
    const char *out;
    int64_t out_left;
    char *in;
    int64_t in_left;
    int32_t socket;
    int32_t error; /* errno of a failure; -1: the other side closed */
} shoal_tcp_link;

enum { DONE, MOVED, IDLE, FAILED };

/* Returns 1 if bytes moved, 0 if none can move now, -1 after a failure, which it notes in the link. */
static int outcome(shoal_tcp_link *link, ssize_t moved, int closed) {
    if (moved > 0) return 1;
    if (moved < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return 0;
    link->error = moved == 0 && closed ? -1 : errno;
    return -1;
}

static int push(shoal_tcp_link *link) {
    ssize_t moved = send(link->socket, link->out, link->out_left, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (moved > 0) link->out += moved, link->out_left -= moved;
    return outcome(link, moved, 0);
}

static int pull(shoal_tcp_link *link) {
    ssize_t moved = recv(link->socket, link->in, link->in_left, MSG_DONTWAIT);
    if (moved > 0) link->in += moved, link->in_left -= moved;
    return outcome(link, moved, 1);
}

/* Bytes that wake a receiver: one thread switch for many packets, since the core has other work. */
#define ENOUGH (256 * 1024)

/* Asks to be woken when ENOUGH bytes, or all that are left, have come. A socket that cannot do so wakes for every
 * packet. */
static void wait_for_enough(shoal_tcp_link *link, int *asked) {
    int bytes = link->in_left < ENOUGH ? link->in_left : ENOUGH;
    if (bytes == *asked) return;
    *asked = bytes;
    setsockopt(link->socket, SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes);
}

/* Moves the bytes of `links` (at most 64). Returns DONE when none are left; FAILED when a link has an error; MOVED or
 * IDLE when none could move for `slice_ms`, or a signal came meanwhile: then call again. */
int64_t shoal_tcp_swap(shoal_tcp_link *links, int64_t count, int64_t slice_ms) {
    struct pollfd waiting[64];
    int asked[64] = {0}, moved = 0;
    for (;;) {
        int left = 0;
        for (int64_t i = 0; i < count; i++) {
            shoal_tcp_link *link = links + i;
            int sent = link->out_left ? push(link) : 0, came = link->in_left ? pull(link) : 0;
            if (sent < 0 || came < 0) return FAILED;
            moved |= sent | came;
            if (link->in_left) wait_for_enough(link, asked + i);
            short events = (link->out_left ? POLLOUT : 0) | (link->in_left ? POLLIN : 0);
            if (events) waiting[left++] = (struct pollfd){link->socket, events, 0};
        }
        if (!left) return DONE;
        if (poll(waiting, left, slice_ms) <= 0) return moved ? MOVED : IDLE;
    }
}
