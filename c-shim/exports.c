// SPDX-License-Identifier: GPL-2.0
/* Exports the functions of src/session/export/mod.rs: EXPORT_SYMBOL_GPL() is C. */
#include <linux/export.h>

#include <kite.h>

EXPORT_SYMBOL_GPL(kite_open);
EXPORT_SYMBOL_GPL(kite_close);
EXPORT_SYMBOL_GPL(kite_set_priority);
EXPORT_SYMBOL_GPL(kite_alloc);
EXPORT_SYMBOL_GPL(kite_map);
EXPORT_SYMBOL_GPL(kite_unmap);
EXPORT_SYMBOL_GPL(kite_free);
EXPORT_SYMBOL_GPL(kite_grant);
EXPORT_SYMBOL_GPL(kite_migrate);
EXPORT_SYMBOL_GPL(kite_read);
EXPORT_SYMBOL_GPL(kite_write);
EXPORT_SYMBOL_GPL(kite_fill);
EXPORT_SYMBOL_GPL(kite_copy);
EXPORT_SYMBOL_GPL(kite_readv);
EXPORT_SYMBOL_GPL(kite_writev);
EXPORT_SYMBOL_GPL(kite_register);
EXPORT_SYMBOL_GPL(kite_atomic);
EXPORT_SYMBOL_GPL(kite_serve);
EXPORT_SYMBOL_GPL(kite_receive);
EXPORT_SYMBOL_GPL(kite_reply);
EXPORT_SYMBOL_GPL(kite_reply_abort);
EXPORT_SYMBOL_GPL(kite_call);
EXPORT_SYMBOL_GPL(kite_send);
EXPORT_SYMBOL_GPL(kite_lock);
EXPORT_SYMBOL_GPL(kite_unlock);
EXPORT_SYMBOL_GPL(kite_barrier);
EXPORT_SYMBOL_GPL(kite_queue_open);
EXPORT_SYMBOL_GPL(kite_submit);
EXPORT_SYMBOL_GPL(kite_cancel);
EXPORT_SYMBOL_GPL(kite_queue_close);
EXPORT_SYMBOL_GPL(kite_reg_mr);
EXPORT_SYMBOL_GPL(kite_dereg_mr);
EXPORT_SYMBOL_GPL(kite_connect);
EXPORT_SYMBOL_GPL(kite_listen);
EXPORT_SYMBOL_GPL(kite_accept);
EXPORT_SYMBOL_GPL(kite_close_vqp);
EXPORT_SYMBOL_GPL(kite_close_listener);
EXPORT_SYMBOL_GPL(kite_push);
EXPORT_SYMBOL_GPL(kite_pop);
EXPORT_SYMBOL_GPL(kite_pop_message);
