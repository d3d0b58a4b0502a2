// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Commands for objects without a context: allocation, deallocation, and queries of counters.

use super::{Handler, Status};
use crate::cost::DeviceCounters;
use crate::device::Device;
use crate::layout::ifc::*;
use crate::layout::{get, set};

/// Returns the handler of a command of this file.
pub(super) fn handler(opcode: u16) -> Option<Handler> {
    match u32::from(opcode) {
        MLX5_CMD_OP_ALLOC_Q_COUNTER => Some(alloc_counter),
        MLX5_CMD_OP_DEALLOC_Q_COUNTER => Some(dealloc_counter),
        MLX5_CMD_OP_QUERY_Q_COUNTER => Some(query_counter),
        MLX5_CMD_OP_ALLOC_PD => Some(alloc_pd),
        MLX5_CMD_OP_DEALLOC_PD => Some(dealloc_unused_pd),
        MLX5_CMD_OP_ALLOC_UAR => Some(alloc_uar),
        MLX5_CMD_OP_DEALLOC_UAR => Some(dealloc_uar),
        MLX5_CMD_OP_ALLOC_XRCD => Some(alloc_xrcd),
        MLX5_CMD_OP_DEALLOC_XRCD => Some(dealloc_xrcd),
        MLX5_CMD_OP_ALLOC_TRANSPORT_DOMAIN => Some(alloc_td),
        MLX5_CMD_OP_DEALLOC_TRANSPORT_DOMAIN => Some(dealloc_td),
        MLX5_CMD_OP_CREATE_UCTX => Some(create_context),
        MLX5_CMD_OP_DESTROY_UCTX => Some(destroy_context),
        _ => None,
    }
}

/// `plain!(alloc_pd, dealloc_pd, pds, alloc_pd_out, dealloc_pd_in, pd)` defines the two commands of a kind.
macro_rules! plain {
    ($alloc:ident, $dealloc:ident, $table:ident, $out:ident, $in:ident, $field:ident) => {
        fn $alloc(device: &mut Device, _: &[u8], output: &mut [u8]) -> Result<(), Status> {
            let number = device
                .objects
                .plain
                .$table
                .insert(Default::default())
                .ok_or(Status::NoResources)?;
            set!(output, $out, $field, number);
            Ok(())
        }

        fn $dealloc(device: &mut Device, input: &[u8], _: &mut [u8]) -> Result<(), Status> {
            let number = get!(input, $in, $field);
            device
                .objects
                .plain
                .$table
                .remove(number)
                .map(|_| ())
                .ok_or(Status::BadResource)
        }
    };
}

plain!(alloc_pd, dealloc_pd, pds, alloc_pd_out, dealloc_pd_in, pd);
plain!(
    alloc_uar,
    dealloc_uar,
    uars,
    alloc_uar_out,
    dealloc_uar_in,
    uar
);
plain!(
    alloc_xrcd,
    dealloc_xrcd,
    xrcds,
    alloc_xrcd_out,
    dealloc_xrcd_in,
    xrcd
);
plain!(
    create_context,
    destroy_context,
    contexts,
    create_uctx_out,
    destroy_uctx_in,
    uid
);
plain!(
    alloc_td,
    dealloc_td,
    tds,
    alloc_transport_domain_out,
    dealloc_transport_domain_in,
    transport_domain
);
plain!(
    alloc_counter,
    dealloc_counter,
    counters,
    alloc_q_counter_out,
    dealloc_q_counter_in,
    counter_set_id
);

fn dealloc_unused_pd(device: &mut Device, input: &[u8], output: &mut [u8]) -> Result<(), Status> {
    let pd = get!(input, dealloc_pd_in, pd);
    let objects = &device.objects;
    let is_used = objects
        .mkeys
        .iter()
        .any(|(_, mkey)| get!(mkey.context, mkc, pd) == pd)
        || objects.qps.iter().any(|(_, qp)| qp.attributes.pd == pd)
        || objects.srqs.iter().any(|(_, srq)| srq.pd == pd)
        || objects.dcts.iter().any(|(_, dct)| dct.pd == pd);
    if is_used {
        return Err(Status::ResourceBusy);
    }
    dealloc_pd(device, input, output)
}

fn query_counter(device: &mut Device, input: &[u8], output: &mut [u8]) -> Result<(), Status> {
    let set = get!(input, query_q_counter_in, counter_set_id);
    let counters = &mut device.objects.plain.counters;
    let counters = counters.get_mut(set).ok_or(Status::BadResource)?;
    let count = *counters;
    if get!(input, query_q_counter_in, clear) != 0 {
        *counters = DeviceCounters::default();
    }
    let wrapped = |value: u64| value as u32;
    set!(
        output,
        query_q_counter_out,
        out_of_buffer,
        wrapped(count.receiver_not_ready)
    );
    set!(
        output,
        query_q_counter_out,
        out_of_sequence,
        wrapped(count.out_of_sequence)
    );
    set!(
        output,
        query_q_counter_out,
        duplicate_request,
        wrapped(count.duplicates)
    );
    set!(
        output,
        query_q_counter_out,
        local_ack_timeout_err,
        wrapped(count.timeouts)
    );
    set!(
        output,
        query_q_counter_out,
        rx_dct_connect,
        wrapped(count.connections_accepted)
    );
    Ok(())
}
