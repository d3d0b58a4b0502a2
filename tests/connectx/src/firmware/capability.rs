// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Capabilities of the device. Commands that use other capabilities are rejected.

use super::{general, Handler, Status};
use crate::bar;
use crate::device::Device;
use crate::layout::ifc::*;
use crate::layout::{at, get, set, size};
use crate::object::{
    memic, mkey, multicast, LOG_CQS, LOG_EQS, LOG_MAX_READS, LOG_MAX_STREAMS, LOG_MKEYS, LOG_QPS,
    LOG_SRQS, LOG_UMEMS,
};

/// Log2 of the maximum size of a message in bytes.
pub(super) const LOG_MAX_MSG: u32 = 30;

/// Kinds of capabilities.
const GENERAL: u32 = 0;
const PAGING: u32 = 2;
const ATOMIC: u32 = 3;
const DEVICE_MEMORY: u32 = 0xf;
/// Kinds of capabilities that the device reports as empty: Ethernet, RoCE, IPoIB, flow tables and switches, quality of
/// service, debugging, TLS, and those added after the 32-bit words of the general kind were used up.
const NONE: [u32; 12] = [1, 4, 5, 6, 7, 8, 9, 0xc, 0xd, 0x11, 0x20, 0x28];

/// Size of the capabilities in a response, in bytes.
const UNION: usize = 4096;

/// Host order: operands of atomic operations have the byte order of the processor.
const HOST_ORDER: u32 = 1;

/// Compare and swap, fetch and add.
const ATOMICS: u32 = 0b11;
/// Mask of the sizes of atomic operands: only 8 bytes, whose bit has the value 8.
const ATOMIC_SIZES: u32 = 8;

/// Capabilities that a driver can change.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Log2 of the number of P_Keys of a port, in units of 128.
    log_pkeys: u32,
    log_qps: u32,
    /// `true` if operands of atomics are in the host's byte order.
    pub host_order: bool,
    /// `true` if absent pages raise page faults.
    pub page_faults: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            log_pkeys: 0,
            log_qps: LOG_QPS,
            host_order: false,
            page_faults: false,
        }
    }
}

/// Returns the handler of a command of this file.
pub(super) fn handler(opcode: u16) -> Option<Handler> {
    match u32::from(opcode) {
        MLX5_CMD_OP_QUERY_HCA_CAP => Some(query),
        MLX5_CMD_OP_SET_HCA_CAP => Some(change),
        MLX5_CMD_OP_QUERY_SPECIAL_CONTEXTS => Some(query_special),
        _ => None,
    }
}

fn query(device: &mut Device, input: &[u8], output: &mut [u8]) -> Result<(), Status> {
    let modifier = get!(input, query_hca_cap_in, op_mod);
    if get!(input, query_hca_cap_in, function_id) != 0 {
        return Err(Status::BadParameter);
    }
    let settings = match modifier & 1 {
        0 => &Settings {
            host_order: true,
            page_faults: true,
            ..Settings::default()
        },
        _ => &device.firmware.settings,
    };
    let capabilities = match modifier >> 1 {
        GENERAL => general(settings, !device.without_dc),
        PAGING => paging(settings),
        ATOMIC => atomic(settings),
        DEVICE_MEMORY => memory(),
        kind if NONE.contains(&kind) => Vec::new(),
        _ => return Err(Status::BadParameter),
    };
    let room = output
        .get_mut(at!(query_hca_cap_out, capability)..)
        .unwrap_or_default();
    let length = room.len().min(capabilities.len());
    room[..length].copy_from_slice(&capabilities[..length]);
    Ok(())
}

fn change(device: &mut Device, input: &[u8], _: &mut [u8]) -> Result<(), Status> {
    let requested = input
        .get(at!(set_hca_cap_in, capability)..)
        .unwrap_or_default();
    let settings = &mut device.firmware.settings;
    match get!(input, set_hca_cap_in, op_mod) >> 1 {
        GENERAL => {
            let log_qps = get!(requested, cmd_hca_cap, log_max_qp);
            let is_unknown = get!(requested, cmd_hca_cap, pkey_table_size) != 0
                || get!(requested, cmd_hca_cap, log_uar_page_sz) != 0
                || get!(requested, cmd_hca_cap, cmdif_checksum) != 0;
            if log_qps > LOG_QPS || is_unknown {
                return Err(Status::BadParameter);
            }
            settings.log_qps = log_qps;
        }
        PAGING => settings.page_faults = get!(requested, odp_cap, mem_page_fault) != 0,
        ATOMIC => {
            let order = get!(requested, atomic_caps, atomic_req_8B_endianness_mode);
            settings.host_order = order == HOST_ORDER;
        }
        _ => return Err(Status::BadParameter),
    }
    Ok(())
}

/// Sets the keys that exist in each device.
fn query_special(_: &mut Device, _: &[u8], output: &mut [u8]) -> Result<(), Status> {
    set!(output, query_special_contexts_out, null_mkey, mkey::NULL);
    set!(
        output,
        query_special_contexts_out,
        terminate_scatter_list_mkey,
        mkey::END_OF_LIST
    );
    Ok(())
}

fn general(settings: &Settings, has_dc: bool) -> Vec<u8> {
    let mut caps = vec![0; UNION];
    sizes(&mut caps, settings);
    transports(&mut caps, has_dc);
    keys(&mut caps);
    queues(&mut caps);
    port(&mut caps, settings);
    doorbells(&mut caps);
    caps
}

/// `can!(caps, rc, uc)`: sets fields of one bit.
macro_rules! can {
    ($caps:expr, $($field:ident),+ $(,)?) => {
        $(set!($caps, cmd_hca_cap, $field, 1u32);)+
    };
}

fn sizes(caps: &mut [u8], settings: &Settings) {
    set!(caps, cmd_hca_cap, log_max_qp, settings.log_qps);
    set!(caps, cmd_hca_cap, log_max_qp_sz, 15u32);
    set!(caps, cmd_hca_cap, log_max_srq, LOG_SRQS);
    set!(caps, cmd_hca_cap, log_max_srq_sz, 15u32);
    set!(caps, cmd_hca_cap, log_max_rmp, LOG_SRQS);
    set!(caps, cmd_hca_cap, log_max_cq, LOG_CQS);
    set!(caps, cmd_hca_cap, log_max_cq_sz, 22u32);
    set!(caps, cmd_hca_cap, log_max_eq, LOG_EQS);
    set!(caps, cmd_hca_cap, log_max_eq_sz, 22u32);
    set!(caps, cmd_hca_cap, log_max_mkey, LOG_MKEYS);
    set!(caps, cmd_hca_cap, log_max_pd, 16u32);
    set!(caps, cmd_hca_cap, log_max_xrcd, 8u32);
    set!(caps, cmd_hca_cap, log_max_transport_domain, 8u32);
    set!(caps, cmd_hca_cap, log_max_uctx, 10u32);
    set!(caps, cmd_hca_cap, log_max_umem, LOG_UMEMS);
    set!(caps, cmd_hca_cap, log_max_mcg, multicast::LOG_GROUPS);
    set!(caps, cmd_hca_cap, max_qp_mcg, multicast::MEMBERS as u32);
    set!(caps, cmd_hca_cap, log_max_msg, LOG_MAX_MSG);
    set!(caps, cmd_hca_cap, max_qp_cnt, 255u32);
}

fn transports(caps: &mut [u8], has_dc: bool) {
    can!(caps, rc, uc, ud, xrc, atomic);
    set!(caps, cmd_hca_cap, dct, u32::from(has_dc));
    // The sender of a multicast packet does not receive the packet.
    can!(caps, block_lb_mc);
    set!(caps, cmd_hca_cap, log_max_ra_req_qp, LOG_MAX_READS);
    set!(caps, cmd_hca_cap, log_max_ra_res_qp, LOG_MAX_READS);
    set!(caps, cmd_hca_cap, log_max_ra_req_dc, LOG_MAX_READS);
    set!(caps, cmd_hca_cap, log_max_ra_res_dc, LOG_MAX_READS);
    set!(
        caps,
        cmd_hca_cap,
        log_max_dci_stream_channels,
        LOG_MAX_STREAMS
    );
    set!(
        caps,
        cmd_hca_cap,
        log_max_dci_errored_streams,
        LOG_MAX_STREAMS
    );
    // Required to reset a stream.
    can!(caps, qpc_extension);
    set!(caps, cmd_hca_cap, general_obj_types, general::TYPES);
    set!(caps, cmd_hca_cap, local_ca_ack_delay, 16u32);
    set!(caps, cmd_hca_cap, compact_address_vector, 1u32);
}

fn keys(caps: &mut [u8]) {
    can!(
        caps,
        imaicl,
        umr_ptr_rlky,
        umr_extended_translation_offset,
        null_mkey,
        device_memory,
        pg
    );
    can!(caps, fixed_buffer_size);
    set!(caps, cmd_hca_cap, log_max_klm_list_size, 16u32);
    set!(caps, cmd_hca_cap, log_max_mrw_sz, 40u32);
    set!(caps, cmd_hca_cap, max_indirection, 4u32);
}

fn queues(caps: &mut [u8]) {
    can!(
        caps,
        cq_oi,
        cq_resize,
        cq_moderation,
        cqe_128_always,
        sctr_data_cqe,
        dc_req_scat_data_cqe
    );
    set!(caps, cmd_hca_cap, cqe_version, 1u32);
    set!(caps, cmd_hca_cap, max_wqe_sz_sq, 1024u32);
    set!(caps, cmd_hca_cap, max_wqe_sz_rq, 512u32);
    set!(caps, cmd_hca_cap, max_wqe_sz_sq_dc, 1024u32);
    set!(caps, cmd_hca_cap, max_sgl_for_optimized_performance, 32u32);
}

fn port(caps: &mut [u8], settings: &Settings) {
    can!(
        caps,
        ib_virt,
        vport_counters,
        out_of_seq_cnt,
        retransmission_q_counters
    );
    set!(caps, cmd_hca_cap, num_ports, 1u32);
    set!(caps, cmd_hca_cap, pkey_table_size, settings.log_pkeys);
    // 8 times 2 to the power of 0.
    set!(caps, cmd_hca_cap, gid_table_size, 0u32);
}

fn doorbells(caps: &mut [u8]) {
    can!(caps, uar_4k, driver_version);
    set!(caps, cmd_hca_cap, num_of_uars_per_page, 1u32);
    set!(caps, cmd_hca_cap, uar_sz, bar::SIZE.ilog2() - 20);
    set!(caps, cmd_hca_cap, log_pg_sz, 12u32);
    // Doorbell registers alternate. WQEs in BlueFlame writes are ignored.
    set!(caps, cmd_hca_cap, log_bf_reg_size, 9u32);
    set!(caps, cmd_hca_cap, device_frequency_khz, bar::FREQUENCY_KHZ);
}

/// Sets the operations that may access absent pages: all operations of reliable services, and sends of datagrams.
fn paging(settings: &Settings) -> Vec<u8> {
    let mut caps = vec![0; size!(odp_cap)];
    macro_rules! can {
        ($service:ident, $($operation:ident),+) => {
            $(set!(caps, odp_cap, memory_page_fault_scheme_cap.$service.$operation, 1u32);)+
        };
    }
    can!(rc_odp_caps, send, receive, write, read, atomic, srq_receive);
    can!(
        xrc_odp_caps,
        send,
        receive,
        write,
        read,
        atomic,
        srq_receive
    );
    can!(dc_odp_caps, send, receive, write, read, atomic, srq_receive);
    can!(ud_odp_caps, send);
    set!(
        caps,
        odp_cap,
        memory_page_fault_scheme_cap.page_prefetch,
        1u32
    );
    set!(
        caps,
        odp_cap,
        mem_page_fault,
        u32::from(settings.page_faults)
    );
    caps
}

fn memory() -> Vec<u8> {
    let mut caps = vec![0; size!(device_mem_cap)];
    set!(caps, device_mem_cap, memic, 1u32);
    set!(
        caps,
        device_mem_cap,
        log_min_memic_alloc_size,
        memic::LOG_MIN_ALLOCATION
    );
    set!(
        caps,
        device_mem_cap,
        log_max_memic_addr_alignment,
        memic::LOG_MAX_ALIGNMENT
    );
    set!(
        caps,
        device_mem_cap,
        memic_bar_start_addr,
        memic::BAR_OFFSET
    );
    set!(caps, device_mem_cap, memic_bar_size, memic::SIZE as u32);
    set!(caps, device_mem_cap, max_memic_size, memic::SIZE as u32);
    caps
}

fn atomic(settings: &Settings) -> Vec<u8> {
    let mut caps = vec![0; size!(atomic_caps)];
    set!(
        caps,
        atomic_caps,
        supported_atomic_req_8B_endianness_mode_1,
        1u32
    );
    set!(
        caps,
        atomic_caps,
        atomic_req_8B_endianness_mode,
        u32::from(settings.host_order)
    );
    set!(caps, atomic_caps, atomic_operations, ATOMICS);
    set!(caps, atomic_caps, atomic_size_qp, ATOMIC_SIZES);
    set!(caps, atomic_caps, atomic_size_dc, ATOMIC_SIZES);
    caps
}
