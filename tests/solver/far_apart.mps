NAME        min
ROWS
 N  time    
 G  reads_since_13_2_10
 G  reads_since_16_2_8
 G  sent_before_15_2_more
 G  sent_before_15_3_more
 L  memory_2
 G  computing_1
 G  computing_2
 L  between_0_1_up
 L  between_0_3_up
 L  between_1_3_down
COLUMNS
    clock_1   computing_1  -1
    clock_1   between_0_1_up  -1
    clock_1   between_1_3_down  1
    clock_2   computing_1  1
    clock_2   computing_2  -1
    clock_3   time      1
    clock_3   computing_2  1
    clock_3   between_0_3_up  -1
    clock_3   between_1_3_down  -1
    kept_10_2  reads_since_13_2_10  1
    kept_10_2  memory_2  708.6614173228
    kept_8_2  reads_since_16_2_8  1
    kept_8_2  memory_2  2992.125984252
    run_3_2   reads_since_13_2_10  1
    run_3_2   computing_2  -971.898625838
    sent_10_1  between_0_1_up  6703.44606251
    sent_10_1  between_1_3_down  -67034.4606251
    sent_14_1  between_0_1_up  24579.3022292
    sent_14_1  between_1_3_down  -245793.022292
    sent_15_1  sent_before_15_2_more  -1
    sent_15_1  between_0_1_up  744.8273402788
    sent_15_1  between_1_3_down  -7448.273402788
    sent_15_2  sent_before_15_2_more  1
    sent_15_2  sent_before_15_3_more  -1
    sent_15_3  sent_before_15_3_more  1
    sent_15_3  between_0_3_up  744.8273402788
    sent_15_3  between_1_3_down  7448.273402788
    sent_7_1  between_0_1_up  8937.928083346
    sent_7_1  between_1_3_down  -89379.28083346
    sent_7_2  time      0
    there_0_0  between_0_1_up  -148965.4680558
    there_0_0  between_0_3_up  -148965.4680558
    there_1_0  between_0_1_up  -1415171.94653
    there_1_2  memory_2  1496.062992126
    there_1_2  between_0_3_up  -1415171.94653
    there_1_2  between_1_3_down  -141517.194653
    there_2_0  between_0_1_up  -521379.1381952
    there_2_2  memory_2  551.1811023622
    there_2_2  between_0_3_up  -521379.1381952
    there_2_2  between_1_3_down  -52137.91381952
    there_3_0  between_0_1_up  -1340689.212502
    there_3_2  memory_2  1417.322834646
    there_3_2  between_0_3_up  -1340689.212502
    there_3_2  between_1_3_down  -134068.9212502
    there_4_0  between_0_1_up  -2011033.818753
    there_4_1  between_0_3_up  -2011033.818753
    there_4_1  between_1_3_down  -201103.3818753
    there_5_0  between_0_1_up  -223448.2020837
    there_5_2  memory_2  236.2204724409
    there_5_2  between_0_3_up  -223448.2020837
    there_5_2  between_1_3_down  -22344.82020837
    up_10_2   reads_since_13_2_10  1
    up_10_2   between_0_3_up  670344.606251
    up_10_2   between_1_3_down  67034.4606251
    up_2_2    time      0
    up_8_2    reads_since_16_2_8  1
    up_8_2    between_0_3_up  2830343.89306
    up_8_2    between_1_3_down  283034.389306
RHS
    RHS_V     reads_since_13_2_10  1
    RHS_V     reads_since_16_2_8  1
    RHS_V     memory_2  2125.984251969
    RHS_V     computing_1  523.03742095
    RHS_V     computing_2  3516.237934478
    RHS_V     between_0_1_up  -5660687.786119
    RHS_V     between_0_3_up  -5660687.786119
    RHS_V     between_1_3_down  -551172.2318063
BOUNDS
 UP BOUND     kept_10_2  1
 UP BOUND     kept_8_2  1
 UP BOUND     run_3_2   1
 UP BOUND     sent_10_1  1
 UP BOUND     sent_14_1  1
 UP BOUND     sent_15_1  1
 UP BOUND     sent_15_2  1
 UP BOUND     sent_15_3  1
 UP BOUND     sent_7_1  1
 UP BOUND     sent_7_2  1
 UP BOUND     there_0_0  1
 UP BOUND     there_1_0  1
 UP BOUND     there_1_2  1
 UP BOUND     there_2_0  1
 UP BOUND     there_2_2  1
 UP BOUND     there_3_0  1
 UP BOUND     there_3_2  1
 UP BOUND     there_4_0  1
 UP BOUND     there_4_1  1
 UP BOUND     there_5_0  1
 UP BOUND     there_5_2  1
 UP BOUND     up_10_2   1
 UP BOUND     up_2_2    1
 UP BOUND     up_8_2    1
ENDATA
