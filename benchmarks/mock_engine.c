/* mock_engine: an OpenAI-compatible engine that computes nothing, to measure what stands in front of it.
 *
 * One thread and one epoll loop serve several ports, each of which plays one worker. Answers are constant but for the send time
 * that every streamed chunk carries ("@" and sixteen hexadecimal digits of CLOCK_MONOTONIC nanoseconds), so that a reader can
 * tell how long a chunk was on its way. It promises to notice a closed connection at once, also while it is silent, and to
 * build a chunk only when the one before has left: it never buffers more than one. It never checks keys, never
 * tokenizes and reads only the members stream, max_tokens (or max_completion_tokens) and include_usage of a body.
 *
 *     mock_engine [--log-unknown] FIRST_PORT PORTS
 *
 *     POST .../chat/completions, .../completions   an answer, or a stream of max_tokens chunks (16 if not said)
 *     GET  /health, /v1/models, /version, /metrics and the model information routes that routers ask of their workers
 *     GET  /control?gap_us=N&first_us=N            time between chunks (0: as fast as they are taken), and before an answer begins
 *     GET  /stats                                  counters; of the requests whose reader left, the number and the last time
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
    PORTS_MAX = 64,
    EVENTS_MAX = 512,
    OUTPUT_BYTES_MAX = 2048,      /* the largest thing ever sent in one piece: a whole answer with its head */
    INPUT_BYTES_START = 4096,
    CHUNKS_DEFAULT = 16,
};

enum state {
    READING,   /* waits for (the rest of) a request */
    WAITING,   /* has a request; the answer begins at due_ns */
    STREAMING, /* sends one chunk each time due_ns comes, unless the last one is not out yet */
};

struct connection {
    int fd;
    int port_index;
    enum state state;

    /* The request being answered. */
    bool is_chat;
    bool is_stream;
    bool wants_usage;
    long chunks_total;
    long chunks_left;
    uint64_t gap_ns; /* as it was when the request came: later changes are for later requests */

    char *input;
    size_t input_length;
    size_t input_capacity;

    char output[OUTPUT_BYTES_MAX];
    size_t output_start;
    size_t output_end;
    bool watches_output; /* epoll tells us when the socket takes bytes again */

    uint64_t due_ns;
    int heap_index; /* -1: not in the schedule */

    bool closed; /* the fd is gone; freed at the end of the turn, since the event list may still name it */
    struct connection *next_closed;
};

struct listener {
    int fd;
    int port_index;
};

static int epoll_fd;
static bool log_unknown;
static uint64_t gap_ns;   /* of the requests to come */
static uint64_t first_ns;

static struct listener listeners[PORTS_MAX];
static int listener_count;
static struct connection *closed_connections;

static struct {
    unsigned long requests;
    unsigned long chunks;
    unsigned long connections; /* open now */
    unsigned long busy;        /* requests that are being answered */
    unsigned long left;        /* requests whose reader closed before the end of the answer */
    uint64_t last_left_ns;
    unsigned long requests_by_port[PORTS_MAX];
} stats;

static uint64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static void die(const char *what)
{
    fprintf(stderr, "mock_engine: %s: %s\n", what, strerror(errno));
    exit(1);
}

/* ---- The schedule: a binary heap of connections by due_ns ---- */

static struct connection **heap;
static int heap_length;
static int heap_capacity;

static void heap_place(int index, struct connection *connection)
{
    heap[index] = connection;
    connection->heap_index = index;
}

static void heap_settle(int index)
{
    struct connection *moving = heap[index];
    while (index > 0 && moving->due_ns < heap[(index - 1) / 2]->due_ns) {
        heap_place(index, heap[(index - 1) / 2]);
        index = (index - 1) / 2;
    }
    for (;;) {
        int child = 2 * index + 1;
        if (child >= heap_length)
            break;
        if (child + 1 < heap_length && heap[child + 1]->due_ns < heap[child]->due_ns)
            child++;
        if (moving->due_ns <= heap[child]->due_ns)
            break;
        heap_place(index, heap[child]);
        index = child;
    }
    heap_place(index, moving);
}

static void schedule(struct connection *connection, uint64_t due_ns)
{
    if (heap_length == heap_capacity) {
        heap_capacity = heap_capacity ? 2 * heap_capacity : 1024;
        heap = realloc(heap, (size_t)heap_capacity * sizeof *heap);
        if (!heap)
            die("out of memory");
    }
    connection->due_ns = due_ns;
    heap_place(heap_length++, connection);
    heap_settle(connection->heap_index);
}

static void unschedule(struct connection *connection)
{
    int index = connection->heap_index;
    if (index < 0)
        return;
    connection->heap_index = -1;
    struct connection *last = heap[--heap_length];
    if (last != connection) {
        heap_place(index, last);
        heap_settle(index);
    }
}

/* ---- Connections ---- */

static void close_connection(struct connection *connection)
{
    if (connection->closed)
        return;
    if (connection->state != READING) {
        stats.busy--;
        stats.left++;
        stats.last_left_ns = now_ns();
    }
    stats.connections--;
    unschedule(connection);
    close(connection->fd);
    connection->closed = true;
    connection->next_closed = closed_connections;
    closed_connections = connection;
}

static void free_closed_connections(void)
{
    while (closed_connections) {
        struct connection *connection = closed_connections;
        closed_connections = connection->next_closed;
        free(connection->input);
        free(connection);
    }
}

static void watch(struct connection *connection, bool output)
{
    if (connection->watches_output == output)
        return;
    connection->watches_output = output;
    struct epoll_event event = {.events = EPOLLIN | (output ? EPOLLOUT : 0), .data.ptr = connection};
    epoll_ctl(epoll_fd, EPOLL_CTL_MOD, connection->fd, &event);
}

/* True when all is out; false when bytes are left (epoll will tell) or the connection broke. */
static bool flush(struct connection *connection)
{
    while (connection->output_start < connection->output_end) {
        ssize_t written = write(connection->fd, connection->output + connection->output_start,
                                connection->output_end - connection->output_start);
        if (written < 0) {
            if (errno == EAGAIN)
                watch(connection, true);
            else
                close_connection(connection);
            return false;
        }
        connection->output_start += (size_t)written;
    }
    connection->output_start = connection->output_end = 0;
    watch(connection, false);
    return true;
}

/* ---- Answers ---- */

#define CHAT_HEAD "{\"id\":\"chatcmpl-5e2b7d1c90f34a68b1d7c2e4f6a80913\",\"object\":\"chat.completion\",\"created\":1767225600,\"model\":\"mock\","
#define TEXT_HEAD "{\"id\":\"cmpl-5e2b7d1c90f34a68b1d7c2e4f6a80913\",\"object\":\"text_completion\",\"created\":1767225600,\"model\":\"mock\","
#define CHAT_CHUNK_HEAD "{\"id\":\"chatcmpl-5e2b7d1c90f34a68b1d7c2e4f6a80913\",\"object\":\"chat.completion.chunk\",\"created\":1767225600,\"model\":\"mock\","
#define SENTENCE "Water runs down the hill because every other way would cost it more."

static const char CHAT_ANSWER[] = CHAT_HEAD
    "\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"" SENTENCE " " SENTENCE "\"},\"logprobs\":null,"
    "\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":200,\"completion_tokens\":32,\"total_tokens\":232}}";
static const char TEXT_ANSWER[] = TEXT_HEAD
    "\"choices\":[{\"index\":0,\"text\":\"" SENTENCE "\",\"logprobs\":null,\"finish_reason\":\"stop\"}],"
    "\"usage\":{\"prompt_tokens\":200,\"completion_tokens\":32,\"total_tokens\":232}}";
static const char STREAM_HEAD[] =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n";
static const char MODELS[] =
    "{\"object\":\"list\",\"data\":[{\"id\":\"mock\",\"object\":\"model\",\"created\":1767225600,\"owned_by\":\"mock\",\"root\":\"mock\","
    "\"max_model_len\":131072}]}";
static const char MODEL_INFORMATION[] =
    "{\"model_path\":\"mock\",\"tokenizer_path\":\"mock\",\"served_model_name\":\"mock\",\"model_type\":\"llama\","
    "\"architectures\":[\"LlamaForCausalLM\"],\"is_generation\":true,\"max_context_length\":131072,\"version\":\"0.5.0\","
    "\"dp_size\":1,\"tp_size\":1}";
static const char METRICS[] =
    "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{model_name=\"mock\"} 0\n"
    "# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{model_name=\"mock\"} 0\n";

static void answer(struct connection *connection, int status, const char *content_type, const char *body)
{
    connection->output_start = 0;
    connection->output_end = (size_t)snprintf(
        connection->output, sizeof connection->output, "HTTP/1.1 %d %s\r\ncontent-type: %s\r\ncontent-length: %zu\r\n\r\n%s",
        status, status == 200 ? "OK" : "Not Found", content_type, strlen(body), body);
    flush(connection);
}

/* Puts one SSE event (or several that travel together) as one HTTP chunk behind what the output holds. */
static void put_chunk(struct connection *connection, const char *event, int length)
{
    char *end = connection->output + connection->output_end;
    size_t room = sizeof connection->output - connection->output_end;
    connection->output_end += (size_t)snprintf(end, room, "%x\r\n%.*s\r\n", (unsigned)length, length, event);
}

static void put_next_token(struct connection *connection)
{
    char event[512];
    unsigned long long sent_ns = now_ns();
    int length = connection->is_chat
        ? snprintf(event, sizeof event,
                   "data: " CHAT_CHUNK_HEAD "\"choices\":[{\"index\":0,\"delta\":{\"content\":\" @%016llx\"},\"logprobs\":null,"
                   "\"finish_reason\":null}]}\n\n", sent_ns)
        : snprintf(event, sizeof event,
                   "data: " TEXT_HEAD "\"choices\":[{\"index\":0,\"text\":\" @%016llx\",\"logprobs\":null,\"finish_reason\":null}]}\n\n",
                   sent_ns);
    put_chunk(connection, event, length);
    connection->chunks_left--;
    stats.chunks++;
}

static void put_end(struct connection *connection)
{
    static const char chat_stop[] =
        "data: " CHAT_CHUNK_HEAD "\"choices\":[{\"index\":0,\"delta\":{},\"logprobs\":null,\"finish_reason\":\"stop\"}]}\n\n";
    static const char text_stop[] =
        "data: " TEXT_HEAD "\"choices\":[{\"index\":0,\"text\":\"\",\"logprobs\":null,\"finish_reason\":\"stop\"}]}\n\n";
    const char *stop = connection->is_chat ? chat_stop : text_stop;
    put_chunk(connection, stop, (int)strlen(stop));
    if (connection->wants_usage) {
        char event[512];
        int length = snprintf(
            event, sizeof event,
            "data: %s\"choices\":[],\"usage\":{\"prompt_tokens\":200,\"completion_tokens\":%ld,\"total_tokens\":%ld}}\n\n",
            connection->is_chat ? CHAT_CHUNK_HEAD : TEXT_HEAD, connection->chunks_total, 200 + connection->chunks_total);
        put_chunk(connection, event, length);
    }
    static const char done[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
    memcpy(connection->output + connection->output_end, done, sizeof done - 1);
    connection->output_end += sizeof done - 1;
}

static void read_requests(struct connection *connection);

static void end_request(struct connection *connection)
{
    connection->state = READING;
    stats.busy--;
}

static void begin_answer(struct connection *connection)
{
    if (!connection->is_stream) {
        end_request(connection);
        answer(connection, 200, "application/json", connection->is_chat ? CHAT_ANSWER : TEXT_ANSWER);
        return;
    }
    connection->state = STREAMING;
    memcpy(connection->output, STREAM_HEAD, sizeof STREAM_HEAD - 1);
    connection->output_start = 0;
    connection->output_end = sizeof STREAM_HEAD - 1;
    if (!flush(connection) || connection->closed)
        return;
    /* Streams that began together spread over one gap, as those of a real engine's many callers do. */
    schedule(connection, now_ns() + (first_ns ? 0 : (uint64_t)(drand48() * (double)connection->gap_ns)));
}

static void send_next(struct connection *connection)
{
    uint64_t was_due_ns = connection->due_ns;
    if (connection->chunks_left > 0) {
        put_next_token(connection);
        if (flush(connection)) {
            uint64_t now = now_ns();
            uint64_t due_ns = was_due_ns + connection->gap_ns;
            bool on_time = connection->gap_ns && due_ns + 4 * connection->gap_ns > now;
            schedule(connection, on_time ? due_ns : now + 1); /* + 1: the others' turn comes first */
        }
        return;
    }
    put_end(connection);
    end_request(connection);
    flush(connection);
}

/* The schedule names this connection and the time has come. */
static void act(struct connection *connection)
{
    if (connection->state == WAITING)
        begin_answer(connection);
    else
        send_next(connection);
    if (!connection->closed && connection->state == READING && connection->output_end == 0)
        read_requests(connection);
}

/* The socket takes bytes again. */
static void resume(struct connection *connection)
{
    if (!flush(connection))
        return;
    if (connection->state == STREAMING)
        schedule(connection, now_ns());
    else if (connection->state == READING)
        read_requests(connection);
}

/* ---- Requests ---- */

/* The value of a member of the JSON text, or NULL. Good enough for bodies whose prompts do not spell out our member names. */
static const char *member(const char *body, size_t length, const char *quoted_name)
{
    const char *found = memmem(body, length, quoted_name, strlen(quoted_name));
    if (!found)
        return NULL;
    const char *value = found + strlen(quoted_name);
    while (value < body + length && (*value == ' ' || *value == ':'))
        value++;
    return value < body + length ? value : NULL;
}

static bool member_is_true(const char *body, size_t length, const char *quoted_name)
{
    const char *value = member(body, length, quoted_name);
    return value && (size_t)(body + length - value) >= 4 && !memcmp(value, "true", 4);
}

static void accept_completion(struct connection *connection, bool is_chat, const char *body, size_t length)
{
    const char *limit = member(body, length, "\"max_tokens\"");
    if (!limit)
        limit = member(body, length, "\"max_completion_tokens\"");
    stats.requests++;
    stats.requests_by_port[connection->port_index]++;
    connection->is_chat = is_chat;
    connection->is_stream = member_is_true(body, length, "\"stream\"");
    connection->wants_usage = member_is_true(body, length, "\"include_usage\"");
    connection->chunks_total = limit && strtol(limit, NULL, 10) > 0 ? strtol(limit, NULL, 10) : CHUNKS_DEFAULT;
    connection->chunks_left = connection->chunks_total;
    connection->gap_ns = gap_ns;
    connection->state = WAITING;
    stats.busy++;
    if (first_ns)
        schedule(connection, now_ns() + first_ns);
    else
        begin_answer(connection);
}

static void control(struct connection *connection, const char *path)
{
    const char *gap = strstr(path, "gap_us=");
    const char *first = strstr(path, "first_us=");
    if (gap)
        gap_ns = strtoull(gap + strlen("gap_us="), NULL, 10) * 1000;
    if (first)
        first_ns = strtoull(first + strlen("first_us="), NULL, 10) * 1000;
    answer(connection, 200, "application/json", "{\"status\":\"ok\"}");
}

static void answer_stats(struct connection *connection)
{
    char body[1024];
    int length = snprintf(body, sizeof body,
                          "{\"requests\":%lu,\"chunks\":%lu,\"connections\":%lu,\"busy\":%lu,\"left\":%lu,\"last_left_ns\":%llu,"
                          "\"requests_by_port\":[",
                          stats.requests, stats.chunks, stats.connections, stats.busy, stats.left,
                          (unsigned long long)stats.last_left_ns);
    for (int i = 0; i < listener_count && length < (int)sizeof body - 32; i++)
        length += snprintf(body + length, sizeof body - (size_t)length, "%s%lu", i ? "," : "", stats.requests_by_port[i]);
    snprintf(body + length, sizeof body - (size_t)length, "]}");
    answer(connection, 200, "application/json", body);
}

static bool starts_with(const char *text, const char *start)
{
    return !strncmp(text, start, strlen(start));
}

/* head is the request's head with a terminating zero: "METHOD PATH HTTP/1.1\r\n..." */
static void dispatch(struct connection *connection, const char *head, const char *body, size_t body_length)
{
    char path[256] = "";
    sscanf(head, "%*15s %255s", path);
    bool is_post = starts_with(head, "POST ");

    if (is_post && strstr(path, "/chat/completions"))
        accept_completion(connection, true, body, body_length);
    else if (is_post && strstr(path, "/completions"))
        accept_completion(connection, false, body, body_length);
    else if (starts_with(path, "/health"))
        answer(connection, 200, "application/json", "{\"status\":\"ok\"}");
    else if (starts_with(path, "/v1/models"))
        answer(connection, 200, "application/json", MODELS);
    else if (starts_with(path, "/metrics"))
        answer(connection, 200, "text/plain; version=0.0.4", METRICS);
    else if (starts_with(path, "/version"))
        answer(connection, 200, "application/json", "{\"version\":\"0.11.0\"}");
    else if (starts_with(path, "/get_model_info") || starts_with(path, "/get_server_info") || starts_with(path, "/model_info") ||
             starts_with(path, "/server_info"))
        answer(connection, 200, "application/json", MODEL_INFORMATION);
    else if (starts_with(path, "/control"))
        control(connection, path);
    else if (starts_with(path, "/stats"))
        answer_stats(connection);
    else {
        if (log_unknown)
            fprintf(stderr, "mock_engine: no such route: %.200s\n", head);
        answer(connection, 404, "application/json", "{\"error\":{\"message\":\"no such route\",\"type\":\"not_found\"}}");
    }
}

/* Decodes a chunked body in place. True when it is whole: its length, and where the next request begins. */
static bool decode_chunked(char *body, size_t available, size_t *length, size_t *used)
{
    size_t read = 0, written = 0;
    for (;;) {
        char *line_end = memmem(body + read, available - read, "\r\n", 2);
        if (!line_end)
            return false;
        size_t size = strtoul(body + read, NULL, 16);
        size_t data = (size_t)(line_end - body) + 2;
        if (data + size + 2 > available)
            return false;
        if (size == 0) { /* no trailers: none of the callers sends them */
            *length = written;
            *used = data + 2;
            return true;
        }
        memmove(body + written, body + data, size);
        written += size;
        read = data + size + 2;
    }
}

/* True when a chunked body is whole. A look before decode_chunked, which destroys what it decodes. */
static bool chunked_is_whole(const char *body, size_t available)
{
    size_t read = 0;
    for (;;) {
        const char *line_end = memmem(body + read, available - read, "\r\n", 2);
        if (!line_end)
            return false;
        size_t size = strtoul(body + read, NULL, 16);
        read = (size_t)(line_end - body) + 2 + size + 2;
        if (read > available)
            return false;
        if (size == 0)
            return true;
    }
}

static void read_framing(const char *head, size_t *content_length, bool *chunked)
{
    *content_length = 0;
    *chunked = false;
    for (const char *line = strstr(head, "\r\n"); line; line = strstr(line + 2, "\r\n")) {
        if (!strncasecmp(line + 2, "content-length:", 15))
            *content_length = strtoul(line + 17, NULL, 10);
        else if (!strncasecmp(line + 2, "transfer-encoding:", 18))
            *chunked = true;
    }
}

/* Serves the requests that the input holds, one after the other, as long as each is answered at once. */
static void read_requests(struct connection *connection)
{
    while (!connection->closed && connection->state == READING && connection->output_end == 0 && connection->input_length > 0) {
        char *input = connection->input;
        char *head_end = memmem(input, connection->input_length, "\r\n\r\n", 4);
        if (!head_end)
            return;
        char *body = head_end + 4;
        size_t available = connection->input_length - (size_t)(body - input);
        size_t body_length, used;
        bool chunked;

        *head_end = '\0';
        read_framing(input, &body_length, &chunked);
        bool whole = chunked ? chunked_is_whole(body, available) : body_length <= available;
        if (!whole) {
            *head_end = '\r';
            return;
        }
        used = body_length;
        if (chunked)
            decode_chunked(body, available, &body_length, &used);
        dispatch(connection, input, body, body_length);
        if (connection->closed)
            return;
        used += (size_t)(body - input);
        connection->input_length -= used;
        memmove(input, input + used, connection->input_length);
    }
}

static void receive(struct connection *connection)
{
    if (connection->input_length == connection->input_capacity) {
        connection->input_capacity *= 2;
        connection->input = realloc(connection->input, connection->input_capacity + 1);
        if (!connection->input)
            die("out of memory");
    }
    ssize_t count = read(connection->fd, connection->input + connection->input_length,
                         connection->input_capacity - connection->input_length);
    if (count < 0 && errno == EAGAIN)
        return;
    if (count <= 0) {
        close_connection(connection);
        return;
    }
    connection->input_length += (size_t)count;
    connection->input[connection->input_length] = '\0';
    read_requests(connection);
}

/* ---- The loop ---- */

static void accept_connections(const struct listener *listener)
{
    static const int one = 1;
    for (int i = 0; i < 64; i++) {
        int fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0)
            return;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        struct connection *connection = calloc(1, sizeof *connection);
        if (!connection || !(connection->input = malloc(INPUT_BYTES_START + 1)))
            die("out of memory");
        connection->fd = fd;
        connection->port_index = listener->port_index;
        connection->input_capacity = INPUT_BYTES_START;
        connection->heap_index = -1;
        stats.connections++;
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = connection};
        epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event);
    }
}

static void listen_on(int port)
{
    static const int one = 1;
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct listener *listener = &listeners[listener_count];
    listener->port_index = listener_count++;
    listener->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    setsockopt(listener->fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener->fd, (struct sockaddr *)&address, sizeof address) || listen(listener->fd, 4096))
        die("cannot listen");
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = listener};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, listener->fd, &event);
}

static bool is_listener(const void *source)
{
    return (const struct listener *)source >= listeners && (const struct listener *)source < listeners + PORTS_MAX;
}

static void serve(const struct epoll_event *event)
{
    if (is_listener(event->data.ptr)) {
        accept_connections(event->data.ptr);
        return;
    }
    struct connection *connection = event->data.ptr;
    if (!connection->closed && (event->events & (EPOLLIN | EPOLLHUP | EPOLLERR)))
        receive(connection);
    if (!connection->closed && (event->events & EPOLLOUT) && connection->watches_output)
        resume(connection);
}

static void turn(void)
{
    struct epoll_event events[EVENTS_MAX];
    struct timespec wait = {0, 0};
    if (heap_length) {
        uint64_t now = now_ns();
        uint64_t wait_ns = heap[0]->due_ns > now ? heap[0]->due_ns - now : 0;
        wait.tv_sec = (time_t)(wait_ns / 1000000000u);
        wait.tv_nsec = (long)(wait_ns % 1000000000u);
    }
    int count = epoll_pwait2(epoll_fd, events, EVENTS_MAX, heap_length ? &wait : NULL, NULL);
    for (int i = 0; i < count; i++)
        serve(&events[i]);
    uint64_t now = now_ns();
    while (heap_length && heap[0]->due_ns <= now) {
        struct connection *connection = heap[0];
        unschedule(connection);
        act(connection);
    }
    free_closed_connections();
}

int main(int count, char **arguments)
{
    int next = 1;
    if (next < count && !strcmp(arguments[next], "--log-unknown")) {
        log_unknown = true;
        next++;
    }
    int first_port = next < count ? atoi(arguments[next]) : 0;
    int ports = next + 1 < count ? atoi(arguments[next + 1]) : 0;
    if (first_port <= 0 || ports <= 0 || ports > PORTS_MAX) {
        fprintf(stderr, "usage: mock_engine [--log-unknown] FIRST_PORT PORTS\n");
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    prctl(PR_SET_TIMERSLACK, 1000ul); /* wake within a microsecond of the time asked for, not fifty */
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    for (int i = 0; i < ports; i++)
        listen_on(first_port + i);
    for (;;)
        turn();
}
