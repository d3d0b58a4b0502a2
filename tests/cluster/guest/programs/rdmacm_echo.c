// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Two ends that exchange words as private data while they connect, and print each event with its
 * private data. The program uses librdmacm alone, and reads events when the descriptor of its
 * channel is readable.
 *
 * rdmacm_echo
 *	accepts connections, and returns the received word; rejects the word "no" with "sorry";
 *	disconnects at once after "late"
 * rdmacm_echo ADDRESS WORD
 *	connects and disconnects; with the word "wait" waits until the peer disconnects; with
 *	"late" reads no event before SIGUSR1
 */

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PORT 7777
#define LONG_MS 60000

static struct rdma_event_channel *channel;

/* The signal before which no event is read. */
static sigset_t late;

static void check(int good, const char *what)
{
	if (good)
		return;
	perror(what);
	exit(1);
}

/* Prints an event of a connection. */
static const char *word(const struct rdma_cm_event *event)
{
	static char said[256];
	const struct rdma_conn_param *conn = &event->param.conn;

	memset(said, 0, sizeof(said));
	if (event->event != RDMA_CM_EVENT_ADDR_RESOLVED && conn->private_data)
		memcpy(said, conn->private_data, conn->private_data_len);
	return said;
}

static struct rdma_cm_event *next(void)
{
	struct pollfd readable = { .fd = channel->fd, .events = POLLIN };
	struct rdma_cm_event *event;

	check(poll(&readable, 1, LONG_MS) == 1, "waiting");
	check(!rdma_get_cm_event(channel, &event), "event");
	printf("%s %d %s\n", rdma_event_str(event->event) + strlen("RDMA_CM_EVENT_"),
	       event->status, word(event));
	fflush(stdout);
	return event;
}

static void create_qp(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr attr = {
		.cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 2, .max_recv_sge = 2 },
		.qp_type = IBV_QPT_RC,
	};

	check(!rdma_create_qp(id, NULL, &attr), "queue pair");
}

static struct rdma_conn_param saying(const char *said)
{
	return (struct rdma_conn_param){ .private_data = said, .private_data_len = strlen(said) };
}

static void answer(struct rdma_cm_id *id, const char *asked)
{
	struct rdma_conn_param param = saying(asked);

	if (!strcmp(asked, "no")) {
		check(!rdma_reject(id, "sorry", strlen("sorry")), "rejecting");
		check(!rdma_destroy_id(id), "ending");
		return;
	}
	create_qp(id);
	check(!rdma_accept(id, &param), "accepting");
	if (!strcmp(asked, "late"))
		check(!rdma_disconnect(id), "disconnecting at once");
}

static void end(struct rdma_cm_id *id)
{
	if (id->qp)
		rdma_destroy_qp(id);
	check(!rdma_destroy_id(id), "ending");
}

/*
 * Listens on another channel until the first request. Then migrates the listener, with that event,
 * to the main channel.
 */
static void listen_for_first(void)
{
	struct sockaddr_in any = { .sin_family = AF_INET, .sin_port = htons(PORT) };
	struct rdma_event_channel *first = rdma_create_event_channel();
	struct pollfd readable = { .fd = first->fd, .events = POLLIN };
	struct rdma_cm_id *listener;

	check(!rdma_create_id(first, &listener, NULL, RDMA_PS_TCP), "identifier");
	check(!rdma_bind_addr(listener, (void *)&any) && !rdma_listen(listener, 8), "listening");
	puts("listening");
	fflush(stdout);
	check(poll(&readable, 1, LONG_MS) == 1, "waiting for the first");
	check(!rdma_migrate_id(listener, channel), "migrating");
	rdma_destroy_event_channel(first);
}

static void serve(void)
{
	struct rdma_cm_id *id;
	struct rdma_cm_event *event;
	enum rdma_cm_event_type type;

	listen_for_first();
	while (1) {
		event = next();
		type = event->event;
		id = event->id;
		if (type == RDMA_CM_EVENT_CONNECT_REQUEST)
			answer(id, word(event));
		rdma_ack_cm_event(event);
		if (type == RDMA_CM_EVENT_TIMEWAIT_EXIT)
			end(id);
	}
}

static void expect(enum rdma_cm_event_type type)
{
	struct rdma_cm_event *event = next();
	int good = event->event == type;

	rdma_ack_cm_event(event);
	/* next() has printed the unexpected event. */
	if (!good)
		exit(2);
}

/* A second disconnect, of either end, must succeed. */
static void disconnect(struct rdma_cm_id *id)
{
	check(!rdma_disconnect(id) && !rdma_disconnect(id), "disconnecting");
}

static void ask(const char *address, const char *said)
{
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(PORT) };
	struct rdma_conn_param param = saying(said);
	struct rdma_cm_id *id;
	int signal;

	to.sin_addr.s_addr = inet_addr(address);
	check(!rdma_create_id(channel, &id, NULL, RDMA_PS_TCP), "identifier");
	check(!rdma_migrate_id(id, channel), "migrating to where it is");
	check(!rdma_resolve_addr(id, NULL, (void *)&to, LONG_MS), "resolving");
	expect(RDMA_CM_EVENT_ADDR_RESOLVED);
	check(!rdma_resolve_route(id, LONG_MS), "finding a route");
	expect(RDMA_CM_EVENT_ROUTE_RESOLVED);
	check(rdma_disconnect(id) < 0, "disconnecting too early");
	create_qp(id);
	check(!rdma_connect(id, &param), "connecting");
	if (!strcmp(said, "late"))
		check(!sigwait(&late, &signal), "waiting for a signal");
	expect(RDMA_CM_EVENT_ESTABLISHED);
	if (strcmp(said, "wait"))
		disconnect(id);
	expect(RDMA_CM_EVENT_DISCONNECTED);
	expect(RDMA_CM_EVENT_TIMEWAIT_EXIT);
	disconnect(id);
	end(id);
}

static void *take(void *of)
{
	struct rdma_cm_event *event;

	rdma_get_cm_event(of, &event);
	return NULL;
}

/* A thread that waits for an event can be cancelled. */
static void cancel(void)
{
	struct rdma_event_channel *quiet = rdma_create_event_channel();
	pthread_t thread;
	void *result;

	check(!pthread_create(&thread, NULL, take, quiet), "a thread");
	check(!pthread_cancel(thread) && !pthread_join(thread, &result), "cancelling");
	check(result == PTHREAD_CANCELED, "an event from nowhere");
	rdma_destroy_event_channel(quiet);
}

int main(int argc, char **argv)
{
	struct rdma_cm_event *none;

	sigemptyset(&late);
	sigaddset(&late, SIGUSR1);
	check(!sigprocmask(SIG_BLOCK, &late, NULL), "blocking a signal");
	channel = rdma_create_event_channel();
	check(!!channel, "channel");
	check(!fcntl(channel->fd, F_SETFL, O_NONBLOCK), "not waiting");
	check(rdma_get_cm_event(channel, &none) < 0, "an event of nothing");
	rdma_freeaddrinfo(NULL);
	cancel();
	if (argc == 3)
		ask(argv[1], argv[2]);
	else
		serve();
	rdma_destroy_event_channel(channel);
	return 0;
}
