//! Message kinds, sizes and fields on the wire (whitepaper 5.4). All integers are little-endian.

/// Length of a handshake initiation.
pub(crate) const INITIATION: usize = 148;
/// Length of a handshake response.
pub(crate) const RESPONSE: usize = 92;
/// Length of a cookie reply.
pub(crate) const COOKIE_REPLY: usize = 64;
/// Length of the header of a data message: type, receiver index, counter.
pub(crate) const DATA_HEADER: usize = 16;
/// Header and tag of a data message; a keepalive is nothing else.
pub(crate) const DATA_OVERHEAD: usize = DATA_HEADER + crate::crypto::TAG;
/// The two MACs at the end of initiation and response.
pub(crate) const MACS: usize = 32;

pub(crate) const TYPE_INITIATION: u32 = 1;
pub(crate) const TYPE_RESPONSE: u32 = 2;
pub(crate) const TYPE_COOKIE_REPLY: u32 = 3;
pub(crate) const TYPE_DATA: u32 = 4;

const _: () = {
    assert!(INITIATION == 8 + 32 + (32 + 16) + (12 + 16) + MACS);
    assert!(RESPONSE == 12 + 32 + 16 + MACS);
    assert!(COOKIE_REPLY == 8 + 24 + 16 + 16);
    assert!(DATA_OVERHEAD == 32);
};

/// A datagram whose type and length fit together.
#[derive(Debug)]
pub(crate) enum Message<'b> {
    Initiation(&'b [u8; INITIATION]),
    Response(&'b [u8; RESPONSE]),
    CookieReply(&'b [u8; COOKIE_REPLY]),
    Data(DataHeader),
}

/// The header of a data message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DataHeader {
    pub(crate) receiver: u32,
    pub(crate) counter: u64,
}

/// The little-endian u32 at `at`, or 0 past the end (never reached: lengths are checked first).
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(|b| b.first_chunk()).map_or(0, |b| u32::from_le_bytes(*b))
}

/// The `N` bytes at `at`, or zeros past the end (never reached: lengths are checked first).
pub(crate) fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes.get(at..).and_then(|b| b.first_chunk()).copied().unwrap_or([0; N])
}

/// Writes `value` at `at`; nothing happens past the end.
pub(crate) fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    if let Some(to) = bytes.get_mut(at..at.saturating_add(value.len())) {
        to.copy_from_slice(value);
    }
}

/// Does this UDP payload, or the first fragment of one, look like a message of this protocol?
pub(crate) fn claims(payload: &[u8]) -> bool {
    payload
        .first_chunk()
        .is_some_and(|kind| (TYPE_INITIATION..=TYPE_DATA).contains(&u32::from_le_bytes(*kind)))
}

/// Tells what a datagram claims to be. `None`: unknown type, non-zero reserved bytes or wrong length.
pub(crate) fn parse(datagram: &[u8]) -> Option<Message<'_>> {
    //@ C-FMT-1
    //@ C-FMT-2
    //@ C-FMT-3
    // The three reserved bytes are part of the comparison: they must be zero.
    match u32::from_le_bytes(*datagram.first_chunk()?) {
        TYPE_DATA if datagram.len() >= DATA_OVERHEAD => Some(Message::Data(DataHeader {
            receiver: u32_at(datagram, 4),
            counter: u64::from_le_bytes(array_at(datagram, 8)),
        })),
        TYPE_INITIATION => datagram.try_into().ok().map(Message::Initiation),
        TYPE_RESPONSE => datagram.try_into().ok().map(Message::Response),
        TYPE_COOKIE_REPLY => datagram.try_into().ok().map(Message::CookieReply),
        _ => None,
    }
}
